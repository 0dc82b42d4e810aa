"""What runs on the far side: a process that forks untrusted programs into namespaces of their own.

Standard library and relative imports only: the interpreter starts with `-S` and never sees the project.
"""
