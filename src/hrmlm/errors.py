"""The one exception that means "the user can fix this"."""


class UserError(ValueError):
    """A mistake in input, told in one line: the value, what is allowed, and the next step.

    The command line prints it on standard error without a traceback and exits with code 2.
    """
