"""A program that tries what isolation must prevent, run by every sandbox before anything else."""

from __future__ import annotations

import json
import typing

from sparrow.errors import UserError

if typing.TYPE_CHECKING:
    from sparrow.sandbox.sandbox import Sandbox

# Prints the barriers that it found open.
_PROBE = """
import ctypes, json, os, socket, struct

libc = ctypes.CDLL(None, use_errno=True)

def works(action):
    try:
        action()
    except OSError:
        return False
    return True

def c_call(name, *arguments):
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)

def capabilities():
    held = ctypes.create_string_buffer(24)
    c_call("capget", struct.pack("Ii", 0x20080522, 0), held)
    if not any(held.raw):
        raise OSError("none")

def privileges_of_programs():
    if libc.prctl(39, 0, 0, 0, 0) == 1:  # PR_GET_NO_NEW_PRIVS
        raise OSError("none")

attempts = {
    "seeing the host's files": lambda: os.stat("/etc/passwd"),
    "seeing the host's processes": lambda: os.stat("/proc/1"),
    "writing outside its home": lambda: open("/file", "w"),
    "opening a network socket": lambda: socket.socket(socket.AF_INET),
    "becoming root": lambda: os.setuid(0),
    "holding capabilities": capabilities,
    "gaining privileges by running a program": privileges_of_programs,
    "mounting": lambda: c_call("mount", b"none", b"/box", b"tmpfs", 0, None),
    "making namespaces": lambda: c_call("unshare", 0x10000000),
    "tracing a process": lambda: c_call("ptrace", 0, 0, 0, 0),
}
open_ = [name for name, action in attempts.items() if works(action)]
if os.getpid() != 2:
    open_.append("a PID namespace of the host's")
if os.getuid() == 0 or os.geteuid() == 0:
    open_.append("being root")
open("file", "w").write("x")
print(json.dumps(open_))
"""


def check_isolation(sandbox: Sandbox) -> None:
    """Raises a UserError that names what a program could do and must not."""
    run = sandbox.run_program(_PROBE)
    if run.status != "exited":
        raise UserError(
            f"sandbox: the program that checks the isolation did not run ({run.status}, exit code {run.code}): "
            f"{run.stderr.strip().splitlines()[-1:]}"
        )
    if barriers := json.loads(run.stdout):
        raise UserError(f"sandbox: programs cannot be isolated here, so none is run; open: {', '.join(barriers)}")
