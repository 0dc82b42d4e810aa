"""Runs untrusted Python programs in namespaces of their own, on Linux 5.15 or newer, as root or not."""

from sparrow.sandbox.sandbox import Failure, ProgramRun, Sandbox, SandboxError

__all__ = ["Failure", "ProgramRun", "Sandbox", "SandboxError"]
