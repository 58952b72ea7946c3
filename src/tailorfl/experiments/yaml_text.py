"""YAML as settings are written in it."""

from __future__ import annotations

import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """YAML with 1e-3 as a number (YAML 1.1 takes it for text), and with duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; raises where a key comes twice: YAML would silently keep the last."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key == "<<":
                continue
            if key in seen:
                problem = f"the key '{key}' comes twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_RULES = yaml.SafeLoader.yaml_implicit_resolvers
Loader.yaml_implicit_resolvers = {mark: list(rules) for mark, rules in _RULES.items()}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
