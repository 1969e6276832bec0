"""The errors a user can meet, one class per kind of failure, each message a sentence."""


class RRFPError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigurationError(RRFPError, ValueError):
    """An option, list or combination that is refused before anything runs. Names the option, its value, the rule and the way out."""


class PipelineError(RRFPError, RuntimeError):
    """The pipeline cannot go on: a peer failed or was lost, a message was wrong, or nothing moved for too long."""
