"""The one exception that means: the user's input is at fault, and this sentence says how."""


class InputError(ValueError):
    """Wrong usage or input: one plain sentence, what was given and what is accepted. The command line exits with 2."""
