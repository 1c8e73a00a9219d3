"""The one exception that means: the user's input is at fault, and this sentence says how."""

from __future__ import annotations


class InputError(ValueError):
    """Wrong usage or input: one plain sentence, what was given and what is accepted. The command line exits with 2."""


class Unsupported(InputError):
    """The native back end does not know what this model does: another back end may."""


def one_line(error: BaseException, most: int = 300) -> str:
    """What an exception says, on one line of bounded length, with escapes for what cannot be printed."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= most else text[:most] + " ..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
