"""The exceptions that end in one line: "the user can fix this", and two of runs with several processes."""


class UserError(ValueError):
    """A mistake in input, told in one line: the value, what is allowed, and the next step.

    The command line prints it on standard error without a traceback and exits with code 2.
    """


class EndedElsewhere(Exception):
    """Another process of the run failed, and tells why; this one ends in silence."""


class LostProcess(RuntimeError):
    """Another process of the run is gone or does not answer."""
