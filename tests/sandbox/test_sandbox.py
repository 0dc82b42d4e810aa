"""Untrusted programs are contained, seen from outside; ordinary ones run as anywhere."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_programs import HOSTILE, ORDINARY, Hostile

from sparrow.errors import UserError
from sparrow.sandbox import Failure, Sandbox, SandboxError
from sparrow.sandbox import worker as worker_module
from sparrow.sandbox.refusal import refusal

SECRET = "a line that no program may read"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """With time enough for any machine."""
    opened = Sandbox(timeout=60, memory_mb=256)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Sandbox]:
    """For programs that end at the time limit only."""
    opened = Sandbox(timeout=1.5, memory_mb=256)
    yield opened
    opened.close()


class Host:
    """What a program may try to reach: a file that anybody may read and write, and sockets that listen."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "secret"
        self.file.write_text(SECRET)
        self.file.chmod(0o666)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", self.port))
        self.abstract = f"sparrow-test-{os.getpid()}-{self.port}"
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(f"\0{self.abstract}")
        self.unix.listen()
        self.sockets = (self.tcp, self.udp, self.unix)
        for each in self.sockets:
            each.setblocking(False)

    def fill_in(self, program: str) -> str:
        project = Path(worker_module.__file__)
        names = {"secret": self.file, "project": project, "port": self.port, "abstract": self.abstract}
        names["prefix"] = Path(pytest.__file__).parents[1]  # where the packages of this environment are
        for name, value in names.items():
            program = program.replace(f"@{name}", str(value))
        return program

    def check_untouched(self) -> None:
        assert self.file.read_text() == SECRET
        assert [path.name for path in self.file.parent.iterdir()] == ["secret"]
        for each in self.sockets:
            with pytest.raises(BlockingIOError):
                each.recv(1) if each is self.udp else each.accept()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    opened = Host(tmp_path)
    yield opened
    for each in opened.sockets:
        each.close()


def _descendants(pid: int) -> list[int]:
    """An orphan's new parent is the first process of its namespace, so that none can leave this tree alive."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
            children.setdefault(int(status.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        new = children.get(left.pop(), [])
        found += new
        left += new
    return found


def _only_worker(sandbox: Sandbox) -> Any:
    with sandbox._worker() as worker:
        return worker


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_hostile_program(case: Hostile, sandbox: Sandbox, hasty: Sandbox, host: Host) -> None:
    chosen = hasty if "timeout" in case.ends else sandbox
    worker = _only_worker(chosen)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = chosen.run_program(host.fill_in(case.program))
    assert run.status in case.ends, run
    assert "REACHED" not in run.stdout, run.stdout[:1000]
    assert len(_descendants(worker.pid)) == 1, "processes are left"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 100 << 10, "memory of this process"
    host.check_untouched()
    assert chosen.run_program("import os\nprint(os.listdir('/tmp'))").stdout == "[]\n"
    assert _only_worker(chosen) is worker, "the program ended its sandbox"


def test_what_hostile_programs_try_can_be_reached(host: Host) -> None:
    """Without the sandbox they reach it: a check that finds nothing must be able to find something."""
    reached = 0
    for name in ("connects by TCP", "sends by UDP", "listens", "an abstract socket of the host's", "the environment"):
        program = next(case.program for case in HOSTILE if case.name == name)
        command = [sys.executable, "-c", host.fill_in(program)]
        reached += "REACHED" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert reached == 5
    assert host.tcp.accept() and host.udp.recv(1) == b"x" and host.unix.accept()


def test_memory_of_many_processes_together(sandbox: Sandbox) -> None:
    """Bounded by a cgroup where there is one; and where there is none, `describe` says so."""
    program = textwrap.dedent("""
        import os, time
        reader, writer = os.pipe()
        for _ in range(6):
            if os.fork() == 0:
                held = b"x" * (120 << 20)
                os.write(writer, b"x")
                time.sleep(3)
                os._exit(0)
        os.close(writer)
        held = 0
        while os.read(reader, 1):
            held += 1
        print("REACHED 720 MB" if held == 6 else "killed")
    """)
    bounded = "memory" in _only_worker(sandbox).group.folders
    assert ("REACHED" not in sandbox.run_program(program).stdout) == bounded
    text = (
        "a cgroup bounds a program's processes together" if bounded else "no cgroup can be made here: of each process"
    )
    assert text in sandbox.describe()[2]


@pytest.mark.parametrize("case", ORDINARY, ids=lambda case: case[0])
def test_ordinary_program(case: tuple[str, str, str, str], sandbox: Sandbox) -> None:
    _, program, stdin, stdout = case
    run = sandbox.run_program(program, stdin)
    assert (run.stdout, run.status, run.stderr) == (stdout, "exited", "")


def test_large_input_that_is_read_and_that_is_not(sandbox: Sandbox) -> None:
    text = "1234567 " * 1_300_000
    assert sandbox.run_program("print(sum(map(int, input().split())))", text).stdout == f"{1234567 * 1_300_000}\n"
    assert sandbox.run_program("print('no')", text).stdout == "no\n"


def test_input_that_is_no_unicode(sandbox: Sandbox) -> None:
    assert sandbox.run_program("print(len(input()), input())", "\ud800\nx").stdout == "3 x\n"


def test_exit_codes(sandbox: Sandbox) -> None:
    assert sandbox.run_program("import sys; print(1); sys.exit(3)").code == 3
    assert sandbox.run_program("import sys; sys.exit('a message')").stderr == "a message\n"
    assert sandbox.run_program("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").code == 128 + 9
    run = sandbox.run_program("def f(): return 1 / 0\nf()")
    assert run.code == 1
    assert run.stderr.splitlines()[1] == '  File "<program>", line 2, in <module>', "no frame of the sandbox's own"


def test_nothing_stays_for_the_next_run(sandbox: Sandbox) -> None:
    leave = "import builtins, random, sys\nbuiltins.left = 1\nopen('left', 'w')\nsys.modules['math'].pi = 3"
    assert sandbox.run_program(leave).status == "exited"
    find = "import builtins, math, os\nprint(hasattr(builtins, 'left'), os.path.exists('left'), math.pi == 3)"
    assert sandbox.run_program(find).stdout == "False False False\n"


def test_no_program_finds_the_text_of_another_in_its_memory(sandbox: Sandbox) -> None:
    """Large objects lie in the heap that grows by `brk`, which is searched in full, with what was freed in it."""
    search = textwrap.dedent("""
        import ctypes, gc
        libc = ctypes.CDLL(None)
        libc.sbrk.restype = ctypes.c_void_p
        end, found = libc.sbrk(0), 0
        mark = "".join(chr(ord(letter) + 1) for letter in "LDRR@FD") * 3
        for start in range(end - 4096, end - (1 << 20), -4096):
            if libc.mincore(ctypes.c_void_p(start), 4096, ctypes.create_string_buffer(1)):
                break
            found += mark.encode() in ctypes.string_at(start, 4096)
        found += sum(mark in item for item in gc.get_objects() if isinstance(item, (str, list, tuple, dict)))
        print(found > 0)
    """)
    text = "# " + "MESSAGE" * 3 + "\n"
    assert sandbox.run_program(text * 100 + search).stdout == "True\n", "the search finds the program's own text"
    assert sandbox.run_program(search).stdout == "False\n"


def test_call_function(sandbox: Sandbox) -> None:
    program = textwrap.dedent("""
        class Solution:
            def pair(self, values: List[int]) -> Tuple[int, float]:
                return len(values), sum(values) / len(values)
        def kinds():
            numbers = [True, 1.5, float("inf"), 10**1000, 1j]
            return [None, numbers, "ü", b"x", (1,), {1, 2}, frozenset({3}), {1: "a"}, {"b": 2}]
        def mirror(value): return value
        def prints(): print("noise"); return 1
        calls = []
        def state(): calls.append(1); return len(calls)
    """)
    assert sandbox.call_function(program, "pair", [[[1, 2]]]) == [(2, 1.5)]
    assert sandbox.call_function(program, "Solution.pair", [[[1, 2, 3]]]) == [(3, 2.0)]
    assert sandbox.call_function(program, "kinds", [[]])[0] == [
        None, [True, 1.5, float("inf"), 10**1000, 1j], "ü", b"x", (1,), {1, 2}, frozenset({3}), {1: "a"}, {"b": 2}
    ]  # fmt: skip
    value = [(1, {2: {"!tuple": [3]}}), {"!set": 1}, -(10**400), "\ud800"]
    assert sandbox.call_function(program, "mirror", [[value]]) == [value]
    assert sandbox.call_function(program, "prints", [[]]) == [1]
    assert sandbox.call_function(program, "state", [[], [], []]) == [1, 1, 1], "each call in a process of its own"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("def f(): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def g(): pass", "NameError: the program defines no 'f'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("def f(): return object()", "TypeError: a object is no plain data"),
        ("def f():\n    x = []\n    x.append(x)\n    return x", "RecursionError: maximum recursion depth exceeded"),
        ("import os\nos._exit(0)", "no readable value: JSONDecodeError"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os\nos.write(3, b'[' * 100000)\nos._exit(0)", "no readable value: RecursionError"),
        ('import os\nos.write(3, b\'{"value": {"!set": [[]]}}\')\nos._exit(0)', "no readable value: TypeError"),
        ('import os\nos.write(3, b\'{"value": {"!eval": []}}\')\nos._exit(0)', "no readable value: KeyError"),
        ("import os\nos.write(3, b'[]')\nos._exit(0)", "no readable value: TypeError"),
        ("import os\nos.write(3, b'{\"value\": ' + b'9' * 10000 + b'}')\nos._exit(0)", "no readable value: ValueError"),
        ("def f(): return {k * (2**61 - 1) for k in range(6000)}", "a value with more than 5000 items in sets"),
        ("def f(): return [{k: {k} for k in range(2501)}]", "a value with more than 5000 items in sets"),
        ("def f(): return {(0,) * 400 + (k,) for k in range(100)}", "a value with more than 5000 items in sets"),
        ("def f(): return {(0,) * 400 + (k,): 1 for k in range(100)}", "a value with more than 5000 items in sets"),
        ("print('\ud800')", "UnicodeEncodeError: "),
        ("import os\nos.write(3, b'\\xff')\nos._exit(0)", "no readable value: UnicodeDecodeError"),
    ],
)
def test_calls_without_a_value(program: str, message: str, sandbox: Sandbox) -> None:
    (failure,) = sandbox.call_function(program, "f", [[]])
    assert isinstance(failure, Failure)
    assert failure.message.startswith(message)


def test_binds_python_path_and_preload(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "helper.py").write_text("import random\nNUMBER = random.random()\n")
    folder = str(tmp_path)
    sandbox = Sandbox(timeout=60, binds=[folder], python_path=[folder], preload=["helper"])
    try:
        program = f"import helper\nprint(helper.NUMBER)\nopen({folder!r} + '/x', 'w')"
        first, second = sandbox.run_program(program), sandbox.run_program(program)
        assert first.stdout == second.stdout != "", "imported once"
        assert "Read-only file system" in first.stderr
    finally:
        sandbox.close()
    with pytest.raises(UserError, match="must be absolute paths that exist, got 'x'"):
        Sandbox(binds=["x"])
    with pytest.raises(
        UserError, match="preload: cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'"
    ):
        Sandbox(preload=["nowhere"])


def test_a_trainer_with_many_descriptors_hands_none_down() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    for descriptor in held:
        os.set_inheritable(descriptor, True)
    sandbox = Sandbox(timeout=60)
    try:
        program = textwrap.dedent("""
            import os
            for number in range(4, 4096):
                try:
                    print(number, os.fstat(number))
                except OSError:
                    pass
        """)
        assert sandbox.run_program(program).stdout == ""
    finally:
        sandbox.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_several_at_a_time_from_several_threads() -> None:
    sandbox = Sandbox(timeout=60, workers=3)
    try:
        results: list[Any] = []
        threads = [
            threading.Thread(target=lambda n=n: results.append((n, sandbox.run_program(f"print({n})").stdout)))
            for n in range(9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == [(n, f"{n}\n") for n in range(9)]
    finally:
        sandbox.close()


def test_a_worker_that_dies_is_replaced_and_the_program_run_again(hasty: Sandbox) -> None:
    os.kill(_only_worker(hasty).pid, signal.SIGKILL)
    assert hasty.run_program("print(1)").stdout == "1\n"


class DyingSandbox:
    """One whose first workers are killed while they run a program."""

    def __init__(self, deaths: int) -> None:
        self.sandbox = Sandbox(timeout=60)
        self.deaths, self.started = deaths, 0
        start = self.sandbox._new
        self.sandbox._workers.get().close()
        self.sandbox._workers.put(None)

        def new() -> worker_module.Worker:
            worker = start()
            self.started += 1
            if self.started <= deaths:
                threading.Thread(target=self._kill, args=(worker.pid,)).start()
            return worker

        self.sandbox._new = new

    def _kill(self, pid: int) -> None:
        while len(_descendants(pid)) < 3:  # zygote, first process, program
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)


def test_a_program_whose_workers_die_has_failed_if_others_run() -> None:
    """A program must not turn its reward into None by ending its sandbox."""
    dying = DyingSandbox(deaths=2)
    try:
        run = dying.sandbox.run_program("import time\ntime.sleep(50)")
        assert (run.status, run.code) == ("failed", 128 + 9)
        assert dying.started == 3
    finally:
        dying.sandbox.close()


def test_memory_in_socket_buffers_is_the_programs_failure(sandbox: Sandbox) -> None:
    """The one way known to end a worker: with a cgroup the kernel takes the largest process, and programs are small."""
    program = textwrap.dedent("""
        import os, socket, time
        def fill():
            held = []
            try:
                for _ in range(120):
                    pair = socket.socketpair()
                    held += pair
                    pair[0].setblocking(False)
                    for each in pair:
                        each.set_inheritable(True)
                    try:
                        while True:
                            pair[0].send(bytes(1 << 16))
                    except BlockingIOError:
                        pass
            except OSError:
                pass
            os.execv("/usr/bin/sleep", ["sleep", "3"])
        for _ in range(25):
            if os.fork() == 0:
                fill()
        time.sleep(2)
    """)
    assert sandbox.run_program(program).status in ("failed", "exited")
    assert sandbox.run_program("print(1)").stdout == "1\n"


def test_workers_that_die_of_an_empty_program_are_the_sandboxs_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox(timeout=60)
    monkeypatch.setattr(worker_module, "_command", lambda descriptor: ["/bin/true"])
    os.kill(_only_worker(sandbox).pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="the sandbox's process"):
        sandbox.run_program("print(1)")
    monkeypatch.undo()
    assert sandbox.run_program("print(1)").stdout == "1\n"
    sandbox.close()


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_nothing_outlives_the_trainer(how: str) -> None:
    """The trainer is killed, or closes the sandbox, while a program runs that would go on for long."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent("""
            import sys, threading, time
            from sparrow.sandbox import Sandbox
            sandbox = Sandbox(timeout=100)
            program = "import time\\nend = time.time() + 50\\nwhile time.time() < end: time.sleep(0.1)"
            threading.Thread(target=lambda: sandbox.run_program(program), daemon=True).start()
            time.sleep(0.5)
            print("started", flush=True)
            sys.stdin.readline()
            with sandbox._workers.mutex: pass
            sys.exit(0)
        """)],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert trainer.stdout is not None and trainer.stdin is not None
    assert trainer.stdout.readline() == "started\n"
    family = _descendants(trainer.pid)
    assert len(family) == 4, "starter, zygote, first process, program"
    if how == "killed":
        trainer.kill()
    else:
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        trainer.stdin.close()
        time.sleep(0.5)
        trainer.terminate()
    trainer.wait(60)
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in family) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


def test_close_ends_all_processes() -> None:
    before = set(_descendants(os.getpid()))
    sandbox = Sandbox(workers=2, timeout=60)
    sandbox.map(sandbox.run_program, ["print(1)"] * 4)
    assert set(_descendants(os.getpid())) > before
    sandbox.close()
    assert set(_descendants(os.getpid())) == before
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.run_program("print(1)")


def test_a_program_at_work_ends_before_its_worker_at_close() -> None:
    before = set(_descendants(os.getpid()))
    sandbox = Sandbox(timeout=30, workers=1)
    printed: list[str] = []
    refused: list[RuntimeError] = []

    def waits() -> None:
        try:
            sandbox.run_program("")
        except RuntimeError as error:
            refused.append(error)

    program = "import time; time.sleep(1); print('done')"
    at_work = threading.Thread(target=lambda: printed.append(sandbox.run_program(program).stdout))
    at_work.start()
    time.sleep(0.3)
    waiting = threading.Thread(target=waits)
    waiting.start()
    time.sleep(0.1)
    sandbox.close()
    for thread in (at_work, waiting):
        thread.join(20)
        assert not thread.is_alive()
    assert printed == ["done\n"] and len(refused) == 1
    assert not set(_descendants(os.getpid())) - before


def test_a_sandbox_is_of_no_use_in_a_fork(sandbox: Sandbox) -> None:
    child = os.fork()
    if child == 0:
        try:
            sandbox.close()
            sandbox.run_program("")
        except RuntimeError as error:
            os._exit(0 if "after a fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sandbox.run_program("print(1)").stdout == "1\n"


def test_programs_neither_lock_nor_watch_nor_flush_files(sandbox: Sandbox) -> None:
    program = textwrap.dedent("""
        import ctypes, errno, fcntl, os
        libc = ctypes.CDLL(None, use_errno=True)
        for name, argument in (("flock", 0), ("syncfs", 0), ("inotify_init1", 0), ("inotify_init", 0)):
            print(name, getattr(libc, name)(argument, 1), errno.errorcode[ctypes.get_errno()])
    """)
    names = ("flock", "syncfs", "inotify_init1", "inotify_init")
    assert sandbox.run_program(program).stdout == "".join(f"{name} -1 EPERM\n" for name in names)


def test_refusal_names_step_and_setting(tmp_path: Path) -> None:
    """In a user namespace that allows no more of them, which is what such a kernel setting does."""
    program = textwrap.dedent("""
        import os, pathlib
        from sparrow.sandbox import Sandbox
        from sparrow.sandbox.inside import kernel
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(kernel.NEW_USER, "")
        pathlib.Path("/proc/self/setgroups").write_text("deny")
        pathlib.Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        pathlib.Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        pathlib.Path("/proc/sys/user/max_user_namespaces").write_text("0")
        Sandbox()
    """)
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert "sandbox: programs cannot be isolated here, so none is run" in last
    assert "Failed step: unshare the user and PID namespaces: No space left on device" in last
    assert "user.max_user_namespaces = 0 (no user namespaces)" in last


def test_refusal_without_a_known_setting() -> None:
    assert "seccomp profile" in refusal("step") or " = " in refusal("step")


def test_works_where_only_one_user_id_can_be_mapped() -> None:
    """As in a container of a user's own: 0 inside, and no other."""
    program = textwrap.dedent("""
        from sparrow.sandbox import Sandbox
        print(Sandbox().run_program("import os; print(os.getuid())").stdout)
    """)
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.stdout == "65534\n\n", run.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"timeout": 0}, "seconds must be between 0.1 and 1000000, got 0"),
        ({"memory_mb": 1}, "memory_mb must be between 64 and 1000000, got 1"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
    ],
)
def test_limits_out_of_range(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sandbox(**argument)
