"""Programs that a model might write to break out, or to break the machine.

Each prints REACHED if it gets what it must not. All are bounded, so that a hole in the sandbox does no harm: a bomb
ends by itself, nothing is deleted, nothing outside the test's own folder is written.
"""

from __future__ import annotations

from dataclasses import dataclass

# A libc call in C's convention; prints REACHED if it works.
_C = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, *arguments):
    if getattr(libc, name)(*arguments) != -1:
        print("REACHED", name, flush=True)
"""
# What is to be reached, tried in Python.
_TRY = """
import os
def attempt(action):
    try:
        print("REACHED", action(), flush=True)
    except Exception as error:
        print(type(error).__name__)
"""


@dataclass(frozen=True)
class Hostile:
    """`ends`: the statuses that are right; a short time limit is given where "timeout" is the only one."""

    name: str
    program: str
    ends: tuple[str, ...] = ("exited",)


HOSTILE = [
    # Too many processes.
    Hostile("fork bomb", """
import os, time
for _ in range(2000):
    try:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
    except OSError:
        break
else:
    print("REACHED 2000 processes")
"""),
    Hostile("fork bomb that forks in its children", """
import os, time
end = time.time() + 5
for depth in range(11):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(max(0, end - time.time()))
""", ("timeout", "exited")),
    Hostile("thread bomb", """
import threading, time
for number in range(500):
    try:
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
    except RuntimeError:
        break
else:
    print("REACHED 500 threads")
""", ("exited",)),
    Hostile("threads that exec", """
import os, sys, threading
def again():
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(20)"])
for _ in range(8):
    threading.Thread(target=again).start()
""", ("timeout",)),
    Hostile("a daemon: setsid, fork twice, go on after the program", """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        end = time.time() + 20
        while time.time() < end:
            time.sleep(0.1)
    os._exit(0)
os._exit(0)
"""),
    # Too much memory, disk, output, time.
    Hostile("memory bomb", """
held = []
for _ in range(40):
    held.append(bytearray(50 << 20))
print("REACHED 2 GB")
""", ("failed",)),
    Hostile("memory bomb in shared mappings", """
import mmap
held = []
for _ in range(40):
    held.append(mmap.mmap(-1, 50 << 20))
    for at in range(0, 50 << 20, 4096):
        held[-1][at] = 1
print("REACHED 2 GB")
""", ("failed",)),
    Hostile("memory in a file without a name", _TRY + "attempt(lambda: os.memfd_create('x'))"),
    Hostile("memory in System V segments", _C + "attempt('shmget', 0, 1 << 20, 0o1600)"),
    Hostile("zip bomb", """
import zlib
packed = zlib.compress(bytes(1 << 30), 9)
held = [zlib.decompress(packed), zlib.decompress(packed)]
print("REACHED 2 GB")
""", ("failed", "timeout")),
    Hostile("disk filler", """
import itertools
try:
    for number in itertools.count():
        with open(str(number), "wb") as file:
            for _ in range(4):
                file.write(bytes(4 << 20))
        if number * 16 > 100:
            print("REACHED 100 MB")
            break
except OSError:
    print("full")
"""),
    Hostile("many small files", """
try:
    for number in range(5000):
        open(str(number), "w").close()
    print("REACHED 5000 files")
except OSError:
    print("full")
"""),
    Hostile("one huge sparse file", "open('x', 'wb').truncate(1 << 40); print('REACHED')", ("failed",)),
    Hostile("flood of stdout", "while True: print('x' * 100000)", ("output",)),
    Hostile("flood of stderr", "import sys\nwhile True: sys.stderr.write('x' * 100000)", ("output",)),
    Hostile("flood of the result's descriptor", "import os\nwhile True: os.write(3, bytes(1000000))", ("output",)),
    Hostile("busy loop", "while True: pass", ("timeout",)),
    Hostile("busy loop in C", "sum(range(10**12))", ("timeout",)),
    Hostile("a regular expression that backtracks", "import re\nre.match('(a+)+b', 'a' * 60)", ("timeout",)),
    Hostile("a number too large", "9**9**9", ("timeout", "failed")),
    Hostile("sleeps for ever", "import time\nwhile True: time.sleep(1000)", ("timeout",)),
    Hostile("ignores every signal", """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""", ("timeout",)),
    Hostile("closes everything and goes on", "import os\nos.closerange(0, 256)\nwhile True: pass", ("timeout",)),
    Hostile("waits for input that never comes", """
import os, select
reader, writer = os.pipe()
os.read(reader, 1)
""", ("timeout",)),
    Hostile("SystemExit out of __del__, and a thread that never ends", """
import threading, time
class Leaves:
    def __del__(self):
        raise SystemExit(0)
threading.Thread(target=lambda: time.sleep(1000)).start()
Leaves()
""", ("timeout",)),
    Hostile("atexit that never ends", "import atexit, time\natexit.register(time.sleep, 1000)", ("timeout",)),
    # The host's files.
    *(
        Hostile(f"reads {path}", _TRY + f"attempt(lambda: open({path!r}, 'rb').read(100))")
        for path in (
            "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/self/environ", "/proc/self/mem", "/proc/kcore",
            "/sys/kernel/notes", "/dev/mem", "/dev/kmsg", "/root/.bashrc", "/var/log/dpkg.log", "@secret", "@project",
            "/tmp/../../../../../../@secret", "/dev/fd/5",
        )
    ),
    Hostile("the trainer's packages", _TRY + """
for name in ("torch", "pytest", "sparrow", "sparrow.sandbox"):
    attempt(lambda: __import__(name))
attempt(lambda: os.listdir("@prefix"))
"""),
    Hostile("lists the host's folders", _TRY + """
for path in ("/home", "/var", "/proc", "/sys", "/host", "/opt", "/srv", "/run", "/mnt"):
    attempt(lambda: os.listdir(path))
"""),
    Hostile("walks up from its home", """
import os
for _ in range(20):
    os.chdir("..")
print("REACHED" if {"proc", "home", "var", "sys"} & set(os.listdir(".")) else os.listdir("."))
"""),
    Hostile("the environment", """
import os
names = set(os.environ) - {"PATH", "LANG", "HOME", "TMPDIR", "PYTHONHASHSEED", "OMP_NUM_THREADS"}
print("REACHED" if names else "nothing", names)
"""),
    Hostile("writes into the tree", _TRY + """
import sys
for path in ("/x", "/usr/x", "/dev/x", "/etc/x", "@secret", os.__file__, sys.executable):
    attempt(lambda: open(path, "ab").write(b"x"))
attempt(lambda: os.chmod(os.__file__, 0o777))
attempt(lambda: os.unlink("/dev/null"))
attempt(lambda: os.rename("/tmp", "/x"))
attempt(lambda: os.mkdir("/x"))
"""),
    Hostile("links out of its home", _TRY + """
os.symlink("@secret", "soft")
attempt(lambda: open("soft").read())
attempt(lambda: os.link("@secret", "hard"))
attempt(lambda: os.link(os.__file__, "hard"))
os.symlink("/", "root")
attempt(lambda: open("root/etc/passwd").read())
"""),
    Hostile("overwrites the interpreter", _TRY + """
attempt(lambda: os.open("/proc/self/exe", os.O_WRONLY))
attempt(lambda: os.open(os.path.realpath(os.sys.executable), os.O_WRONLY))
"""),
    Hostile("descriptors of the trainer's", """
import os
found = []
for number in range(4, 1024):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print("REACHED" if found else "none", found)
"""),
    Hostile("writes into its own text and input", _TRY + """
attempt(lambda: os.pwrite(0, b"x", 0))
attempt(lambda: os.ftruncate(0, 1 << 30))
"""),
    Hostile("a setting of the kernel", _TRY + """
attempt(lambda: open("/proc/sys/kernel/hostname", "w").write("x"))
import socket
attempt(lambda: socket.sethostname("x"))
"""),
    Hostile("devices", _TRY + """
import stat
attempt(lambda: os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0)))
attempt(lambda: os.open("/dev/tty", os.O_RDWR))
attempt(lambda: os.open("/dev/kvm", os.O_RDWR))
"""),
    Hostile("runs what it wrote", _TRY + """
with open("run", "w") as file:
    file.write("#!/bin/sh\\necho REACHED\\n")
os.chmod("run", 0o4777)
attempt(lambda: os.execv("./run", ["run"]))
"""),
    # The network.
    Hostile("connects by TCP", _TRY + """
import socket
attempt(lambda: socket.create_connection(("127.0.0.1", @port), timeout=2))
attempt(lambda: socket.create_connection(("1.1.1.1", 53), timeout=2))
"""),
    Hostile("sends by UDP", _TRY + """
import socket
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", @port)))
attempt(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b"x", ("::1", @port)))
"""),
    Hostile("listens", _TRY + "import socket\nattempt(lambda: socket.create_server(('127.0.0.1', 0)))"),
    Hostile("an abstract socket of the host's", _TRY + """
import socket
attempt(lambda: socket.socket(socket.AF_UNIX).connect("\\0@abstract"))
"""),
    Hostile("other kinds of sockets", _TRY + """
import socket
for family in (16, 17, 38, 40, 31, 44):  # netlink, packet, alg, vsock, bluetooth, xdp
    for kind in (1, 2, 3, 5):
        attempt(lambda: socket.socket(family, kind))
"""),
    Hostile("looks up a name", _TRY + "import socket\nattempt(lambda: socket.gethostbyname('example.com'))"),
    # Privileges.
    Hostile("becomes root", _TRY + """
attempt(lambda: os.setuid(0))
attempt(lambda: os.setresuid(0, 0, 0))
attempt(lambda: os.setgroups([0]))
attempt(lambda: os.chown("/tmp", 0, 0))
print("REACHED" if 0 in os.getresuid() + os.getresgid() else "nobody")
"""),
    Hostile("namespaces and mounts", _C + """
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80):
    attempt("unshare", flag)
    attempt("setns", 0, flag)
attempt("mount", b"none", b"/tmp", b"tmpfs", 0, None)
attempt("mount", b"proc", b"/tmp", b"proc", 0, None)
attempt("umount2", b"/tmp", 2)
attempt("umount2", b"/usr/lib", 2)
attempt("chroot", b"/tmp")
attempt("syscall", 155, b"/tmp", b"/tmp")
"""),
    Hostile("a child in a user namespace", _C + """
import platform
clone, clone3 = {"x86_64": (56, 435), "aarch64": (220, 435)}[platform.machine()]
pid = libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0:
    os._exit(0)
if pid > 0:
    print("REACHED clone")
attempt("syscall", clone3, None, 0)
"""),
    Hostile("calls of the kernel that were ways out before", _C + """
import platform
numbers = {"x86_64": {"bpf": 321, "perf": 298, "uring": 425, "keyctl": 250, "userfaultfd": 323, "handle": 304},
           "aarch64": {"bpf": 280, "perf": 241, "uring": 425, "keyctl": 219, "userfaultfd": 282, "handle": 265}}
for name, number in numbers[platform.machine()].items():
    ctypes.set_errno(0)
    libc.syscall(number, 0, 0, 0, 0, 0)
    if ctypes.get_errno() != 1:
        print("REACHED", name, ctypes.get_errno())
"""),
    Hostile("takes its limits away", _TRY + """
import resource
for name in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
    attempt(lambda: resource.setrlimit(name, (resource.RLIM_INFINITY,) * 2))
attempt(lambda: resource.prlimit(1, resource.RLIMIT_NPROC))
attempt(lambda: os.nice(-10))
"""),
    Hostile("traces and reads its parent", _C + """
attempt("ptrace", 16, 1, 0, 0)
attempt("ptrace", 0, 0, 0, 0)
buffer = ctypes.create_string_buffer(64)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
mine, theirs = Vector(ctypes.addressof(buffer), 64), Vector(ctypes.addressof(buffer), 64)
attempt("process_vm_readv", 1, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
"""),
    Hostile("kills everybody", """
import os, signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGKILL, signal.SIGSTOP):
    for target in (1, -1):
        try:
            os.kill(target, number)
        except OSError:
            pass
print("still here")
"""),
    # Crashes.
    Hostile("crashes", "import ctypes\nctypes.string_at(0)", ("failed",)),
    Hostile("recursion without end", """
import sys
sys.setrecursionlimit(10**9)
def f(): return [*map(lambda _: f(), [0])]
f()
""", ("failed", "timeout")),
    Hostile("aborts", "import os\nos.abort()", ("failed",)),
    Hostile("replaces the builtins", """
import builtins, json, os, io, sys
for name in ("print", "open", "isinstance", "len", "exec", "compile", "type", "getattr"):
    setattr(builtins, name, lambda *a, **k: "REACHED")
json.dumps = json.loads = lambda *a, **k: "REACHED"
os._exit = lambda code: None
os.write = lambda *a: 0
sys.stdout = None
""", ("exited", "failed", "timeout")),
]  # fmt: skip

ORDINARY = [
    ("sum of two", "a, b = map(int, input().split())\nprint(a + b)", "3 4\n", "7\n"),
    ("lines until the end", "import sys\nprint(sum(int(line) for line in sys.stdin))", "1\n2\n3", "6\n"),
    ("all at once", "import sys\nprint(sys.stdin.read().split()[::-1])", "a b", "['b', 'a']\n"),
    ("bytes", "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.readline())", "x\n", "x\n"),
    ("end of the input", "try:\n    input()\nexcept EOFError:\n    print('end')", "", "end\n"),
    ("no newline at the end", "print(input(), end='')", "ü – 漢字", "ü – 漢字"),
    ("deep recursion", """
import sys
sys.setrecursionlimit(20000)
def f(n): return n and 1 + f(n - 1)
print(f(10000))
""", "", "10000\n"),
    ("recursion in a thread with a large stack", """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 27)
def f(n): return n and 1 + f(n - 1)
thread = threading.Thread(target=lambda: print(f(50000)))
thread.start()
thread.join()
""", "", "50000\n"),
    ("the standard library", """
import heapq, collections, math, itertools, functools, bisect, re, json, decimal, fractions, datetime, random, copy
from typing import List, Optional
heap = [3, 1, 2]
heapq.heapify(heap)
print(heapq.heappop(heap), collections.Counter("aab")["a"], math.gcd(12, 18), decimal.Decimal(1) / 3)
""", "", "1 2 6 0.3333333333333333333333333333\n"),
    ("more of it", """
import sqlite3, hashlib, zlib, ssl, uuid, statistics
print(hashlib.md5(b'').hexdigest()[:4])
""", "", "d41d\n"),
    ("an event loop", """
import asyncio
async def f(): return await asyncio.sleep(0, 3)
print(asyncio.run(f()))
""", "", "3\n"),
    ("floats", "print(0.1 + 0.2, 1e300 * 10, f'{2 / 3:.3f}')", "", "0.30000000000000004 1e+301 0.667\n"),
    ("a main guard", "if __name__ == '__main__':\n    print(1)", "", "1\n"),
    ("exit", "print(1)\nexit()\nprint(2)", "", "1\n"),
    ("sys.exit in a function", "import sys\ndef main():\n    print(1)\n    sys.exit(0)\nmain()", "", "1\n"),
    ("its own output buffer", """
import sys, io, os, atexit
buffer = io.BytesIO()
sys.stdout = io.TextIOWrapper(buffer, write_through=True)
atexit.register(lambda: os.write(1, buffer.getvalue()))
print(5)
""", "", "5\n"),
    ("files in its home", """
import os
open('x', 'w').write('abc')
print(open(os.path.expanduser('~/x')).read())
""", "", "abc\n"),
    ("threads", """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(lambda x: x * x, range(10))))
""", "", "285\n"),
    ("processes", """
import multiprocessing
def f(x): return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(f, [1, 2]))
""", "", "[1, 4]\n"),
    ("another interpreter", "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(4)'], "
     "capture_output=True, text=True).stdout, end='')", "", "4\n"),
    ("a dataclass", "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1))", "", "P(x=1)\n"),
    ("names of modules are free", "json = re = 3\nclass Solution: pass\nprint(json)", "", "3\n"),
]  # fmt: skip
