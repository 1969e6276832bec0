"""Which parameters `--freeze` and `--unfreeze` mean, by their names. Pure."""

import re
from collections.abc import Iterable, Sequence

from rrfp.errors import ConfigurationError

_NAMED = {"vit": r"^vision\.(?!projector\.)", "projector": r"^vision\.projector\.", "llm": r"^language\.", "all": ""}


def is_frozen(name: str, patterns: Sequence[str], *, but: Sequence[str] = ()) -> bool:
    """Whether `name` has a match of one of `patterns` and none of one of `but`.

    name: a parameter's, with layers numbered over their whole tower: `language.decoder.layers.3.mlp.linear_fc1.weight`.
    patterns, but: regular expressions, or `vit` (without the projector), `projector`, `llm`, `all`.

    Raises:
        ConfigurationError: one is no regular expression.
    """
    frozen, kept = ([_pattern(text, option) for text in texts] for texts, option in ((patterns, "--freeze"), (but, "--unfreeze")))
    return any(pattern.search(name) for pattern in frozen) and not any(pattern.search(name) for pattern in kept)


def matched(names: Iterable[str], patterns: Sequence[str], *, option: str) -> list[bool]:
    """For each of `patterns` whether any of these parameters' names has a match. Raises as `is_frozen`."""
    names = list(names)
    return [any(pattern.search(name) for name in names) for pattern in (_pattern(text, option) for text in patterns)]


def _pattern(text: str, option: str) -> re.Pattern:
    try:
        return re.compile(_NAMED.get(text, text))
    except re.error as error:
        raise ConfigurationError(
            f"{option} {text}: is no regular expression ({error}); give vit, projector, llm, all, or one on names like "
            "language.decoder.layers.3.mlp.linear_fc1.weight") from None
