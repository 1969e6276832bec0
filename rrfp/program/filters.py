"""Filters: which nodes a directive speaks of."""

from collections.abc import Iterable, Mapping

from rrfp.errors import ConfigurationError
from rrfp.program.dag import PASSES, Node

Filter = Mapping[str, int | str]
"""Tag -> index, all of which must hold. `"*"`: any index, `"-"`: not tagged; `{}` is everything. `PASS` is F, B, I or W. Split
dimensions are tags too."""

ANY, NONE, PASS = "*", "-", "PASS"


def matches(filter: Filter, node: Node) -> bool:
    """Whether `node` is one that `filter` speaks of."""
    for tag, wanted in filter.items():
        found = (node.phase or None) if tag == PASS else node.tags.get(tag, node.dims.get(tag))
        if (found is not None) if wanted == NONE else (found is None or wanted not in (ANY, found)):
            return False
    return True


def check_filter(filter: Filter, *, where: str) -> None:
    """Raises ConfigurationError for what is no filter, naming the directive (`where`), the tag and the value."""
    for tag, wanted in filter.items():
        allowed = PASSES if tag == PASS else (ANY, NONE)
        right = wanted in allowed if isinstance(wanted, str) else tag != PASS and type(wanted) is int and wanted >= 0
        if not right:
            rule = "must be F, B, I or W" if tag == PASS else 'must be an index, "*" (any) or "-" (not tagged)'
            raise ConfigurationError(f"{where}: {tag} {wanted!r}: {rule}")


class Index:
    """Nodes, found quickly by their tags."""

    def __init__(self, nodes: Iterable[Node]):
        self._nodes = list(nodes)
        self._by: dict[tuple[str, int | str], list[Node]] = {}
        for node in self._nodes:
            for item in (*node.tags.items(), *node.dims.items(), (PASS, node.phase)):
                self._by.setdefault(item, []).append(node)

    def find(self, filter: Filter) -> list[Node]:
        """The nodes that `filter` speaks of, perhaps none."""
        exact = [self._by.get((tag, wanted), []) for tag, wanted in filter.items() if wanted not in (ANY, NONE)]
        return [node for node in min(exact, key=len, default=self._nodes) if matches(filter, node)]

    def select(self, filter: Filter, *, where: str) -> list[Node]:
        """The same. Raises ConfigurationError if it speaks of none, naming the tag that none of the nodes has."""
        if found := self.find(filter):
            return found
        tag = next((tag for tag, wanted in filter.items() if not self.find({tag: wanted})), None)
        if tag is None:
            raise ConfigurationError(f"{where}: {text_of(filter)}: matches nothing: no node has all of these tags; leave one out")
        has = sorted({str(index) for name, index in self._by if name == tag and index != ""}, key=lambda text: (len(text), text))
        known = f"the nodes have {tag} = {', '.join(has)}" if has else f"no node has tag {tag}"
        raise ConfigurationError(f"{where}: {text_of(filter)}: matches nothing: {known}")


def select(filter: Filter, nodes: Iterable[Node], *, where: str) -> list[Node]:
    """`Index.select` for one filter."""
    return Index(nodes).select(filter, where=where)


def text_of(filter: Filter) -> str:
    """`{PP=0, MB=*}`."""
    return "{" + ", ".join(f"{tag}={wanted}" for tag, wanted in filter.items()) + "}"
