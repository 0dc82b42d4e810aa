"""The exceptions that a user is meant to read.

Everything else that escapes a recipe is a bug and keeps its traceback; these are printed as one line.
"""

# Of what ended without a save of its own.
RESUME_ADVICE = "where the recipe has saves, resume=auto goes on from the last complete one"

# Of a recipe's process, and of `tune run`.
EXIT_USER_ERROR = 2
EXIT_ALARM = 3
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """Something the user can mend: says the value, the limit or the accepted values, and the key or file."""


class Interrupted(Exception):
    """The user asked to stop (Ctrl-C or SIGTERM); raised only where the run's state is consistent."""


class AlarmStop(Exception):
    """An alarm of the config ended the run; raised only where the run's state is saved."""
