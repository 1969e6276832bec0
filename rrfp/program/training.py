"""From a forward graph to the training DAG of one whole batch: forwards, backwards, updates."""

from rrfp.errors import ConfigurationError
from rrfp.program.dag import COMPUTE, DAG, UPDATE, Draft, Node
from rrfp.program.traced import Traced


def training_dag(traced: Traced) -> DAG:
    """One F per segment, one B per segment that the loss reaches and that trains or lies above one that does, one UPDATE per trained
    segment. A parameter that two segments share is updated with the first of them.

    Raises:
        ConfigurationError: if the loss trains nothing.
    """
    if not traced.trained:
        raise ConfigurationError(f"model: loss {traced.loss}: no trained parameter lies below it; nothing can be trained")
    draft = Draft(DAG({}, (), {segment.name: segment for segment in traced.segments}, dict(traced.tensors)))
    trained = {segment.name for segment in traced.trained}

    def name(phase: str, segment: str) -> str:
        return f"{phase}:{segment}"

    for segment in traced.segments:
        draft.add(Node(COMPUTE, segment.name, "F", segment.tags))
        for tensor in segment.inputs:
            if tensor in traced.producer:
                draft.link(name("F", traced.producer[tensor].name), name("F", segment.name), tensor=tensor)
    for segment in reversed(traced.trained):
        draft.add(Node(COMPUTE, segment.name, "B", segment.tags))
        draft.link(name("F", segment.name), name("B", segment.name), tensor=f"saved.{segment.name}")
    for segment in reversed(traced.trained):
        for tensor in segment.inputs:
            source = traced.producer.get(tensor)
            if source is not None and source.name in trained and traced.tensors[tensor].differentiable:
                draft.link(name("B", segment.name), name("B", source.name), tensor=f"d.{tensor}")
    owner: dict[str, str] = {}
    for segment in traced.trained:
        if not segment.parameters or segment.frozen:
            continue
        for parameter in segment.parameters:
            owner.setdefault(parameter, segment.name)
        for target in dict.fromkeys(owner[parameter] for parameter in segment.parameters):
            draft.add(Node(UPDATE, target, tags=draft.nodes[name("F", target)].tags))
            draft.link(name("B", segment.name), f"UPDATE:{target}", tensor=f"grad.{segment.name}")
    return draft.dag()
