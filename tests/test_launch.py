from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import psutil
import pytest
import torch.distributed as dist

from sparrow.cli import main
from sparrow.errors import RESUME_ADVICE, UserError
from sparrow.launch import Arguments, parse_arguments, stop_requested
from sparrow.peers import is_lost_peer

TUNE = [sys.executable, "-m", "sparrow", "run"]
TOY = ["toy_recipe.py", "--config", "toy.yaml"]


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--config", "tiny"], Arguments("tiny")),
        (["--config=a=b.yaml", "x=1", "~y"], Arguments("a=b.yaml", ["x=1", "~y"])),
        (["x=--config", "--config", "tiny", "--validate", "--verbose"], Arguments("tiny", ["x=--config"], True, True)),
        (["-h"], Arguments(help=True)),
    ],
)
def test_arguments(argv: list[str], expected: Arguments) -> None:
    assert parse_arguments(argv) == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--config NAME_OR_PATH is missing"),
        (["--config"], "--config needs the name"),
        (["--config="], "--config needs the name"),
        (["--config", "--validate"], "--config needs the name"),
        (["--config", "a", "--config=b"], "--config is given twice"),
        (["--cfg", "a"], "unknown option --cfg, did you mean '--config'?"),
        (["--config", "a", "--nproc_per_node", "2"], "options of torchrun stand before the name of the recipe"),
    ],
)
def test_bad_arguments(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_arguments(argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "code", "stdout", "stderr"),
    [
        (["nested.size=4"], 0, "setup rank=0 part=Part(width=2)\ntrained size=4\ncleanup\n", ""),
        (["end=user_error"], 2, "cleanup\n", "error: lr: 2.0 is above the limit of 1.0\n"),
        (["end=setup_error"], 2, "cleanup\n", "error: checkpoint: not found\n"),
    ],
)
def test_a_recipe_ends_with_its_exit_code(
    toy: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], code: int, stdout: str, stderr: str
) -> None:
    assert main(["run", *TOY, *overrides]) == code
    output, errors = capfd.readouterr()
    assert output.startswith("recipe: toy_recipe.py\n") and output.endswith(stdout)
    assert errors == stderr


def test_a_clean_up_that_fails_does_not_hide_the_first_error(toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *TOY, "end=user_error", "cleanup_fails=true"]) == 2
    warning, error = capfd.readouterr().err.splitlines()
    assert warning == "warning: the clean-up failed as well: OSError('a file is gone')"
    assert error == "error: lr: 2.0 is above the limit of 1.0"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (dist.DistBackendError("NCCL error: unhandled system error\n/dev/shm/nccl-1: No space left on device"), False),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistNetworkError("recvValue failed: Connection reset by peer"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_only_a_lost_peer_is_called_one(error: Exception, lost: bool) -> None:
    """What is wrong with NCCL's own set-up keeps its traceback."""
    assert is_lost_peer(error) is lost


def test_a_bug_keeps_its_traceback_and_cleans_up(toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        main(["run", *TOY, "end=bug"])
    assert capfd.readouterr().out.endswith("cleanup\n")


def wait_for(stream: IO[str], start: str, count: int = 1) -> None:
    """Reads on until so many lines have that start."""
    for line in stream:
        count -= line.startswith(start)
        if not count:
            return
    raise AssertionError(f"the process ended without {start!r}")


@pytest.mark.parametrize(
    ("launcher", "ranks", "number"),
    [([sys.executable], 1, signal.SIGTERM), ([*TUNE, "--nproc_per_node", "2"], 2, signal.SIGINT)],
)
def test_a_signal_stops_the_recipe_at_a_safe_point(
    toy: Path, launcher: list[str], ranks: int, number: signal.Signals
) -> None:
    with subprocess.Popen([*launcher, *TOY, "end=stop"], stdout=subprocess.PIPE, text=True, cwd=toy) as process:
        assert process.stdout is not None
        wait_for(process.stdout, "setup", ranks)
        process.send_signal(number)
        assert process.communicate(timeout=60)[0].count("cleanup\n") == ranks
    assert process.returncode == 130


def test_a_second_ctrl_c_stops_at_once(toy: Path) -> None:
    recipe = (toy / "toy_recipe.py").read_text().replace("check_stop()\n", "say('busy')\n")
    (toy / "toy_recipe.py").write_text(recipe)
    command, pipe = [sys.executable, *TOY, "end=stop"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=toy) as process:
        assert process.stdout is not None and process.stderr is not None
        wait_for(process.stdout, "busy")
        process.send_signal(signal.SIGINT)
        wait_for(process.stderr, "stopping at the next safe point")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors and "cleanup\n" in output


def test_ctrl_c_before_the_recipe_listens_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    command, pipe = [*TUNE, "slow.py", "--config", "x"], subprocess.PIPE
    # A shell starts what it puts in the background with SIGINT ignored, and this test may run there.
    heed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, **heed) as process:
        assert process.stdout is not None
        wait_for(process.stdout, "importing")
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (130, "error: interrupted\n")


def test_no_stop_is_requested_before_a_signal() -> None:
    assert not stop_requested()


def test_ranks_form_a_group_and_the_config_is_printed_once(toy: Path) -> None:
    done = run([*TUNE, "--nproc-per-node=2", *TOY], toy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recipe: toy_recipe.py") == 1
    assert all(f"setup rank={rank} part=Part(width=2)" in done.stdout for rank in (0, 1))


@pytest.mark.parametrize(
    ("overrides", "code", "line"),
    [
        (["end=user_error", "on_rank=1"], 2, "error: lr: 2.0 is above the limit of 1.0"),
        (["end=bug", "on_rank=1"], 1, f"error: rank 1 failed with exit code 1; {RESUME_ADVICE}"),
    ],
)
def test_an_error_of_a_rank_is_said_once(toy: Path, overrides: list[str], code: int, line: str) -> None:
    done = run([*TUNE, "--nproc_per_node", "2", *TOY, *overrides], toy)
    assert done.returncode == code
    errors = [text for text in done.stderr.splitlines() if "[rank1]" not in text]
    assert errors == [line]


def started(toy: Path, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*TUNE, *arguments], stdout=pipe, stderr=pipe, text=True, cwd=toy)


def ended(*runs: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit codes and what was said on stderr."""
    said = [run.communicate(timeout=100)[1] for run in runs]
    return [(run.returncode, text) for run, text in zip(runs, said, strict=True)]


def wait_for_ranks(running: subprocess.Popen[str], ranks: int) -> list[psutil.Process]:
    """The processes, once they are at work."""
    assert running.stdout is not None
    for _ in range(ranks):
        while "setup rank=" not in running.stdout.readline():
            assert running.poll() is None
    return psutil.Process(running.pid).children()


def two_nodes(toy: Path, *overrides: str, second: tuple[str, ...] = ()) -> list[subprocess.Popen[str]]:
    """Two agents of torchrun, each with one rank. Neither knows of the other's, and work is no collective."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    return [started(toy, *node, *TOY, "work=600", *overrides, *more) for more in ((), second)]


@pytest.mark.parametrize(
    ("override", "words"),
    [("nosuch=1", "nosuch"), ("nested.size=2", "the nodes were given different settings: nested.size: ")],
)
def test_a_node_with_another_config_ends_both_and_says_why(toy: Path, override: str, words: str) -> None:
    """Whichever of them has the store."""
    for code, said in ended(*two_nodes(toy, "nested.size=1", second=(override,))):
        assert code in (1, 2) and words in said, said
        assert "Traceback" not in said and "frame #" not in said


def test_a_worker_that_is_killed_ends_those_of_other_nodes(toy: Path) -> None:
    """No rank is left on its node, but torchrun's agent is."""
    for code, said in ended(*two_nodes(toy, "end=killed", "on_rank=1")):
        assert code in (1, 137) and "error: rank 1 was killed by signal 9; " in said


def test_ctrl_c_in_several_processes_is_said_once(toy: Path) -> None:
    running = started(toy, "--nproc_per_node", "2", *TOY, "end=stop")
    wait_for_ranks(running, 2)
    running.send_signal(signal.SIGINT)
    ((code, said),) = ended(running)
    assert code == 130 and said.count("error: interrupted\n") == 1 == said.count("stopping at the next safe point")


def test_a_second_ctrl_c_ends_several_processes_at_once(toy: Path) -> None:
    running = started(toy, "--nproc_per_node", "2", *TOY, "work=600")
    workers = wait_for_ranks(running, 2)
    running.send_signal(signal.SIGINT)
    time.sleep(4)
    assert all(worker.is_running() for worker in workers), "they have not come to a safe point"
    running.send_signal(signal.SIGINT)
    assert ended(running)[0][0] == 130
    assert psutil.wait_procs(workers, timeout=20)[1] == []


def test_workers_whose_torchrun_is_killed_end_and_say_so(toy: Path) -> None:
    running = started(toy, "--nproc_per_node", "2", *TOY, "work=600")
    wait_for_ranks(running, 2)
    running.kill()
    assert "error: lost torchrun's store" in ended(running)[0][1]  # the pipe is theirs as well: they have ended


def test_restarts_are_refused(toy: Path) -> None:
    ((code, said),) = ended(started(toy, "--nproc_per_node", "2", "--max_restarts", "1", *TOY))
    assert code == 2 and said.startswith("error: tune run: --max_restarts 1: ") and said.count("\n") == 1


def test_a_rank_that_fails_ends_those_that_work_on_another_node(toy: Path) -> None:
    runs = ended(*two_nodes(toy, "end=bug", "on_rank=1"))
    errors = "".join(text for _, text in runs)
    assert [code for code, _ in runs] == [1, 1]
    assert "[rank1]: RuntimeError: a bug" in errors and "rendezvous.api" not in errors
    assert f"error: rank 1 failed: RuntimeError: a bug; this ended all ranks, and {RESUME_ADVICE}\n" in errors


def test_a_rank_that_is_killed_ends_those_that_work_beside_it(toy: Path) -> None:
    """They are in no collective, or in one of NCCL over NVLink, which does not notice either."""
    done = run([*TUNE, "--nproc_per_node", "3", *TOY, "end=killed", "on_rank=1", "work=600"], toy)
    assert done.returncode == 137 and f"error: rank 1 was killed by signal 9; {RESUME_ADVICE}\n" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_lost_ends_the_others(toy: Path, rank: int) -> None:
    """Its process stands still: no connection is closed, nobody is told."""
    nodes = two_nodes(toy, "end=suspended", f"on_rank={rank}", "silence=3")
    deadline = time.monotonic() + 100
    while all(node.poll() is None for node in nodes) and time.monotonic() < deadline:
        time.sleep(0.1)
    done, lost = sorted(nodes, key=lambda node: node.poll() is None)
    for process in psutil.Process(lost.pid).children():
        process.kill()
    lost.communicate(timeout=100)
    ((code, said),) = ended(done)
    assert code == 1 and f"error: rank {rank} has not been heard of for 3 s" in said


def test_names_of_a_recipe_are_found_when_runpy_leaves_main_alone(toy: Path) -> None:
    """torchtune's own command line runs a recipe by runpy.run_module without alter_sys."""
    sys_argv = f"import sys; sys.argv = {TOY}"
    code = f"{sys_argv}; import runpy; runpy.run_module('toy_recipe', run_name='__main__')"
    done = run([sys.executable, "-c", code], toy)
    assert done.returncode == 0 and done.stdout.endswith("trained size=3\ncleanup\n"), done.stderr


def test_help_lists_the_keys(toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "toy_recipe.py", "--help"]) == 0
    output = capfd.readouterr().out
    assert output.startswith("Ends as it is told.\n")
    assert "  on_rank: int = 0\n" in output and "  recipe: str\n" in output


def test_validate_checks_and_runs_nothing(toy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *TOY, "--validate"]) == 0
    assert capfd.readouterr().out == "ok\n"
