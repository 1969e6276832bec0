"""Program files: directives, and perhaps a model, as JSON with a schema (`schema.json`); or a training DAG as text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.program.dag import DAG
from rrfp.program.directives import Directive, Order, Place, Replicate, Shard, Split, apply
from rrfp.program.text import HEADER, parse_dag
from rrfp.program.traced import Segment, Tensor, Traced, sketch
from rrfp.program.training import training_dag
from rrfp.program.validate import validate
from rrfp.program.workload import PythonModel

_KINDS = {"split": Split, "place": Place, "shard": Shard, "replicate": Replicate, "order": Order}
_RENAMED = {"dim_name": "dim"}


@dataclass(frozen=True)
class Program:
    """A strategy, and the model that it is for, if the file describes one or names its Python."""

    directives: tuple[Directive, ...]
    model: Traced | PythonModel | None = None

    @property
    def devices(self) -> int:
        """How many processes it runs on."""
        return 1 + max((device for each in self.directives for device in getattr(each, "devices", ())), default=0)

    def dag(self, model: Traced | None = None) -> DAG:
        """Its training DAG; a model in Python is made and captured for it.

        Raises:
            ConfigurationError: if no model is known, it cannot be captured, or a directive does not go with it.
        """
        model = model or self.model
        if model is None:
            raise ConfigurationError('program: describes no model; give it a "model", for example {"sketch": {"stages": 4}}')
        if isinstance(model, PythonModel):
            model = model.make().capture().traced
        return apply(training_dag(model), self.directives)


def read_dag(path: str | Path) -> DAG:
    """The training DAG of a program file, or the one that a text file prints. Raises ConfigurationError naming the file and the place in it."""
    text = _text(path)
    if is_text(path):
        dag = parse_dag(text)
        validate(dag)
        return dag
    return _parse(text, path).dag()


def read_program(path: str | Path) -> Program:
    """A program file. Raises ConfigurationError naming the file, the place in it and the rule."""
    return _parse(_text(path), path)


def is_text(path: str | Path) -> bool:
    """Whether a file is the text of a DAG. Raises ConfigurationError if it cannot be read."""
    return _text(path).lstrip().startswith(HEADER)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read ({error}); give a program file") from None


def _parse(text: str, path: str | Path) -> Program:
    try:
        return parse_program(json.loads(text), folder=Path(path).parent)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: is neither JSON nor the text of a DAG ({error}); it must begin with {{ or {HEADER!r}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def parse_program(document: Mapping, *, folder: Path = Path()) -> Program:
    """A program from what JSON holds. Raises ConfigurationError naming the place in it and the rule.

    folder: from which a model's Python file is named.
    """
    error = next(iter(sorted(_validator().iter_errors(document), key=lambda e: (-len(e.absolute_path), list(map(str, e.absolute_path))))), None)
    if error is not None:
        if error.context:  # of the alternatives, the one that came furthest
            error = max(error.context, key=lambda e: len(e.absolute_path))
        where = "/".join(map(str, error.absolute_path)) or "the file"
        raise ConfigurationError(f"{where}: {error.message}; see the schema, rrfp/program/schema.json")
    return Program(tuple(_directive(*next(iter(each.items()))) for each in document["directives"]), _model(document.get("model"), folder))


@cache
def _validator():
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise ConfigurationError("program files need jsonschema, which is not installed (pip install 'rrfp[program]')") from error
    return Draft202012Validator(json.loads(files("rrfp.program").joinpath("schema.json").read_text()))


def _directive(kind: str, values: Mapping) -> Directive:
    if kind == "order":
        return Order(tuple(tuple(group) for group in values["row"]))
    values = {_RENAMED.get(name, name): value for name, value in values.items()}
    if "devices" in values:
        values["devices"] = tuple(values["devices"])
    return _KINDS[kind](**values)


def _model(document: Mapping | None, folder: Path) -> Traced | PythonModel | None:
    if document is None:
        return None
    if "python" in document:
        return PythonModel(**document, folder=folder)
    if "sketch" in document:
        return sketch(**document["sketch"])
    segments = [Segment(**{name: tuple(value) if isinstance(value, list) else value for name, value in each.items()})
                for each in document["segments"]]
    tensors = {name: Tensor(**{**each, "shape": tuple(each["shape"])}) for name, each in document["tensors"].items()}
    return Traced(tuple(segments), tensors, document["loss"])


def program_document(directives: Sequence[Directive], model: Mapping | None = None) -> dict:
    """What `parse_program` reads: fields at their defaults are left out.

    model: as a file holds it, for example `{"sketch": {"stages": 4}}`, `{"python": "my_model.py:make"}`, or `model_document`'s.
    """
    names = {kind: name for name, kind in _KINDS.items()}
    found = [{names[type(directive)]: _values(directive)} for directive in directives]
    return {**({} if model is None else {"model": model}), "directives": found}


def model_document(model: Traced) -> dict:
    """A traced model as a program file holds it."""
    return {"segments": [_values(segment) for segment in model.segments],
            "tensors": {name: _values(tensor) for name, tensor in model.tensors.items()}, "loss": model.loss}


def _values(directive: Directive | Segment | Tensor) -> dict:
    back = {field: name for name, field in _RENAMED.items()}
    kept = {field.name for field in fields(directive) if field.default is MISSING or getattr(directive, field.name) != field.default}
    return {back.get(name, name): value for name, value in asdict(directive).items() if name in kept}


def write_program(path: str | Path, directives: Sequence[Directive], model: Mapping | None = None) -> None:
    """A program file: one directive, or one position of a row, per line."""
    document = program_document(directives, model)
    lines = []
    for each in document["directives"]:
        if "order" in each:
            row = ",\n      ".join(json.dumps(group) for group in each["order"]["row"])
            lines.append(f'    {{"order": {{"row": [\n      {row}]}}}}')
        else:
            lines.append("    " + json.dumps(each))
    head = f'  "model": {json.dumps(model)},\n' if model is not None else ""
    Path(path).write_text("{\n" + head + '  "directives": [\n' + ",\n".join(lines) + "\n  ]\n}\n", encoding="utf-8")
