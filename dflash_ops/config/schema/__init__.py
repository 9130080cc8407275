"""JSON Schemas of hosts and playbooks, for editors.

`python -m dflash_ops.config.schema` writes them anew from the models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_ops.config.base import NAME
from dflash_ops.config.host import Host
from dflash_ops.config.playbook import Playbook

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FOLDER = Path(__file__).parent


def host_schema() -> dict[str, Any]:
    """A file with one host, or with several below `hosts`."""
    schema = _schema(Host)
    definitions = schema.pop("$defs", {})
    schema.pop("$schema")
    return {
        "$schema": DIALECT,
        "title": "dflash-ops host",
        "if": {"required": ["hosts"]},
        "then": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "hosts": {
                    "type": "object",
                    "minProperties": 1,
                    "propertyNames": {"pattern": f"^(?:{NAME.pattern})$"},
                    "additionalProperties": {"$ref": "#/$defs/Host"},
                }
            },
        },
        "else": {"$ref": "#/$defs/Host"},
        "$defs": {**definitions, "Host": schema},
    }


def playbook_schema() -> dict[str, Any]:
    return {**_schema(Playbook), "title": "dflash-ops playbook"}


def _schema(model: type[Host] | type[Playbook]) -> dict[str, Any]:
    made = {"$schema": DIALECT, **model.model_json_schema()}
    # the file's name is the default
    made["required"] = [key for key in made["required"] if key != "name"]
    return made


def texts() -> dict[Path, str]:
    """What the committed files must hold."""
    made = {"host": host_schema(), "playbook": playbook_schema()}
    return {FOLDER / f"{name}.schema.json": json.dumps(schema, indent=2) + "\n" for name, schema in made.items()}
