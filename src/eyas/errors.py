"""The one exception that means: the user's input is at fault, and this sentence says how."""

from __future__ import annotations


class InputError(ValueError):
    """Wrong usage or input: one plain sentence, what was given and what is accepted. The command line exits with 2."""


class Unsupported(InputError):
    """The native back end does not know what this model does: another back end may."""


def one_line(error: BaseException) -> str:
    """What an exception of somebody else's says, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."
