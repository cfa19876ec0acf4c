"""Runs programs that nobody has read, each in a cage. `_sandbox.py` starts it as `python -I -S _sandbox_main.py`; it needs the
standard library only.

    this process ----> jailer (own namespaces) ----> supervisor (process 1 inside) ----> the program
      reads the task,    makes the cage, reads          watches time and processes,        limits, Landlock, exec
      writes results     what was written               kills all that is left

Everything that the kernel refuses is left out, and the result says which parts of the cage there were.
"""

import contextlib
import ctypes
import fcntl
import json
import math
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from typing import Any

Json = dict[str, Any]

LIBC = ctypes.CDLL(None, use_errno=True)
NAMESPACES = {"user": 0x10000000, "mount": 0x00020000, "network": 0x40000000, "process": 0x20000000, "ipc": 0x08000000}
MS_PRIVATE, MS_REC, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1 << 18, 1 << 14, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = (
    442,
    444,
    445,
    446,
)  # the same numbers on every machine
TAKEN = ".flattened-"
GRACE_S = 3.0
"""Seconds beyond the limit after which the supervisor itself is given up."""


def main() -> None:
    task = json.load(sys.stdin)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what removes the folder
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    LIBC.prctl(PR_SET_DUMPABLE, 0)
    end = time.monotonic() + task["limits"]["total_s"]
    results: list[Json] = []
    for run in task["runs"]:
        left = end - time.monotonic()
        if left <= 0:
            results.append({"status": "not run"})
            continue
        results.append(
            in_a_cage(run, task["python"], {**task["limits"], "time_s": min(task["limits"]["time_s"], left)})
        )
    json.dump(results, sys.stdout)


def in_a_cage(run: Json, python: str, limits: Json) -> Json:
    folder = tempfile.mkdtemp(prefix="flowrl-code-")
    try:
        return in_folder(folder, run, python, limits)
    finally:
        remove(folder)


def in_folder(folder: str, run: Json, python: str, limits: Json) -> Json:
    reader, writer = os.pipe()
    jailer = os.fork()
    if not jailer:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(reader)
        try:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            result: Json = jail(run, python, limits, folder)
        except BaseException as error:
            result = {"status": "broken", "why": f"{type(error).__name__}: {error}"}
        with os.fdopen(writer, "wb") as file:
            file.write(json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as file:
            text = read_all(file.fileno(), time.monotonic() + limits["time_s"] + 2 * GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(jailer, signal.SIGKILL)
        os.waitpid(jailer, 0)
    return json.loads(text) if text else {"status": "broken", "why": "the jailer gave no result"}


def remove(folder: str) -> None:
    """Delete a folder, whatever a program made in it: one that is too deep to walk is flattened, level by level."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    number = 0
    with contextlib.suppress(OSError):
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    number += 1
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)  # a folder that moves must be writable itself
                    os.rename(inner.path, f"{folder}/{TAKEN}{number}")
                os.rmdir(entry.path)
        os.rmdir(folder)


def read_all(fd: int, deadline: float) -> bytes:
    os.set_blocking(fd, False)
    found = bytearray()
    while time.monotonic() < deadline:
        try:
            part = os.read(fd, 1 << 20)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        if not part:
            break
        found += part
    return bytes(found)


def jail(run: Json, python: str, limits: Json, folder: str) -> Json:
    """Make the cage, let the supervisor run the program in it, and collect what it wrote."""
    cage = make_namespaces(folder, limits["files_bytes"], limits["namespaces"])
    files = {name: os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "report")}
    with os.fdopen(os.dup(files["stdin"]), "wb") as stdin:
        stdin.write(run["stdin"].encode("utf-8", "surrogatepass"))
    os.lseek(files["stdin"], 0, os.SEEK_SET)
    reader, writer = os.pipe()
    supervisor = os.fork()
    if not supervisor:
        os.close(reader)
        try:
            verdict = supervise(run, python, limits, folder, files, cage)
        except BaseException as error:
            verdict = {"status": "broken", "why": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(verdict).encode())
        os._exit(0)
    os.close(writer)
    text = read_all(reader, time.monotonic() + limits["time_s"] + GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    result: Json = json.loads(text) if text else {"status": "timeout"}
    result["cage"] = {**cage, **result.get("cage", {})}
    for name in ("stdout", "stderr", "report"):
        size = os.fstat(files[name]).st_size
        most = limits["output_bytes"] if name != "stderr" else 4000
        result[name] = os.pread(files[name], most, max(0, size - most) if name == "stderr" else 0).decode(
            "utf-8", "replace"
        )
        if size >= limits["output_bytes"]:
            result["status"] = "output"
    return result


# ------------------------------------------------------------------------------------------------------------ the cage


def make_namespaces(folder: str, files_bytes: int, is_allowed: bool) -> Json:
    """Namespaces of our own, a file system that is read-only but for `folder`. Which of them there are."""
    cage: Json = dict.fromkeys(("files", "network", "processes"), False)
    uid, gid = os.getuid(), os.getgid()
    if not is_allowed or LIBC.unshare(sum(NAMESPACES.values())):
        return cage
    try:
        write("/proc/self/setgroups", "deny")
        # not root inside: exec then leaves no capabilities, so nothing below can be undone
        write("/proc/self/uid_map", f"1000 {uid} 1")
        write("/proc/self/gid_map", f"1000 {gid} 1")
    except OSError:
        pass
    cage["network"] = cage["processes"] = True
    if LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return cage
    read_only = struct.pack("QQQQ", 1, 0, 0, 0)
    at_cwd, recursive = -100, 0x8000
    if LIBC.syscall(MOUNT_SETATTR, at_cwd, b"/", recursive, read_only, ctypes.c_size_t(len(read_only))):
        return cage
    options = f"size={files_bytes},mode=0700".encode()
    cage["files"] = not LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    return cage


def write(path: str, text: str) -> None:
    with open(path, "wb") as file:  # a lone surrogate is for the program to fail on
        file.write(text.encode("utf-8", "surrogatepass"))


FS_WRITE = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write_file, remove_*, make_*
FS_REFER, FS_TRUNCATE = 1 << 13, 1 << 14


def landlock(folder: str) -> int:
    """Allow writing in `folder` only, no TCP, and no signals to processes outside; the kernel's ABI, 0 where there is none."""
    abi = LIBC.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return 0
    files = FS_WRITE | (FS_REFER if abi >= 2 else 0) | (FS_TRUNCATE if abi >= 3 else 0)
    asked = struct.pack("QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = LIBC.syscall(LANDLOCK_CREATE, asked, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return 0
    for path, allowed in ((folder, files), ("/dev/null", FS_WRITE & 2 | files & FS_TRUNCATE)):
        fd = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, fd)
        failed = LIBC.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(fd)
        if failed and path == folder:
            return 0
    return 0 if LIBC.syscall(LANDLOCK_RESTRICT, ruleset, 0) else abi


# ------------------------------------------------------------------------------------------------------ the supervisor


def supervise(run: Json, python: str, limits: Json, folder: str, files: Json, cage: Json) -> Json:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    is_first = os.getpid() == 1
    if is_first:  # the program sees its own processes only, where the kernel allows it
        LIBC.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            become(run, python, limits, folder, files, writer)
        except BaseException as error:
            os.write(writer, json.dumps({"why": f"{type(error).__name__}: {error}"}).encode())
        os._exit(127)
    os.close(writer)
    deadline = time.monotonic() + limits["time_s"]
    status, code = "timeout", None
    looks = 0
    while time.monotonic() < deadline:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            code = os.waitstatus_to_exitcode(ended)
            status = "exit" if code >= 0 else "signal"
            break
        looks += 1
        if (is_first or not looks % 10) and processes(is_first) > limits["processes"]:
            status = "processes"
            break
        if not pid:
            time.sleep(0.003)
    kill_all(child, is_first)
    said = json.loads(read_all(reader, time.monotonic() + 0.5) or b"{}")
    if "why" in said:
        return {"status": "broken", "why": said["why"]}
    is_fenced = said.get("landlock", 0)
    cage = {"files": cage["files"] or is_fenced >= 1, "tcp": cage["network"] or is_fenced >= 4}
    return {"status": status, "code": code, "cage": cage}


def processes(is_first: bool) -> int:
    """Processes and threads that were started in our namespace so far; without one, descendants that are there."""
    with contextlib.suppress(OSError, ValueError):
        if is_first:
            with open("/proc/loadavg") as file:
                return int(file.read().split()[-1]) - 1  # the last process id given out, of this namespace
        return len(children(os.getpid(), deep=True))
    return 0


def children(parent: int, deep: bool = False) -> list[int]:
    """Process ids of the children of a process, or of all its descendants."""
    of: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat") as file:
                of.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    found = list(of.get(parent, []))
    for one in found if deep else ():
        found.extend(of.get(one, []))
    return found


def kill_all(child: int, is_first: bool) -> None:
    """End the program and all it started, those included that left its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    end = time.monotonic() + GRACE_S / 2
    while time.monotonic() < end:
        if is_first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:  # orphans come to us, generation after generation
            for pid in children(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def become(run: Json, python: str, limits: Json, folder: str, files: Json, said: int) -> None:
    """Turn into the program: files, limits, fence, exec."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(folder)
    high = [fcntl.fcntl(files[name], fcntl.F_DUPFD_CLOEXEC, 20) for name in ("stdin", "stdout", "stderr", "report")]
    said = fcntl.fcntl(said, fcntl.F_DUPFD_CLOEXEC, 20)
    for target, fd in enumerate(high):
        os.dup2(fd, target)  # all else closes when the program takes over
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
        signal.signal(number, signal.SIG_DFL)
    if "program" in run:
        write("program.py", run["program"])
        command = [python, "-I", "-B", "program.py"]
    else:
        command = [python, "-I", "-B", "-c", run["command"]]
    wanted = [
        (resource.RLIMIT_CPU, math.ceil(limits["time_s"]) + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["output_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ]
    if os.getpid() < 10:  # in a namespace of processes; outside, all that the user runs would count
        wanted.append((resource.RLIMIT_NPROC, limits["processes"]))
    for name, number in wanted:
        most = resource.getrlimit(name)[1]
        number = number if most == resource.RLIM_INFINITY else min(number, most)
        resource.setrlimit(name, (number, number))
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.write(said, json.dumps({"landlock": landlock(folder)}).encode())
    os.execve(
        command[0],
        command,
        {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )


if __name__ == "__main__":
    main()
