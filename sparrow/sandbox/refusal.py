"""Why a kernel refuses isolation, in words: the step, and the settings that are known to forbid it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# Setting under /proc/sys, the values that forbid, and what it means.
_SETTINGS = (
    ("user/max_user_namespaces", ("0",), "no user namespaces"),
    ("user/max_pid_namespaces", ("0",), "no PID namespaces"),
    ("user/max_net_namespaces", ("0",), "no network namespaces"),
    ("user/max_mnt_namespaces", ("0",), "no mount namespaces"),
    ("kernel/unprivileged_userns_clone", ("0",), "user namespaces for root only"),
    ("kernel/apparmor_restrict_unprivileged_userns", ("1", "2"), "AppArmor takes the rights in them away"),
)


def refusal(step: str) -> str:
    """The line for the user; `step` says what was tried and what the kernel answered."""
    reasons = [
        f"{setting.replace('/', '.')} = {value} ({meaning})"
        for setting, forbidding, meaning in _SETTINGS
        if (value := _value(setting)) in forbidding
    ]
    if not reasons:
        reasons = [
            "no setting of the kernel that is known to forbid it; a container's seccomp profile or a missing "
            "CAP_SYS_ADMIN may (docker run --security-opt seccomp=PROFILE with unshare, mount and pivot_root allowed)"
        ]
    return (
        f"sandbox: programs cannot be isolated here, so none is run. Failed step: {step} (uid {os.geteuid()}, "
        f"Linux {platform.release()}). Reason: {'; '.join(reasons)}"
    )


def _value(setting: str) -> str | None:
    path = Path("/proc/sys") / setting
    return path.read_text().strip() if path.exists() else None
