"""What goes wrong with a model or a prompt, local to the engine so that it stands alone.

EngineError
+- ModelError     weights or tokenizer cannot be had, do not match their digest, or are of an unknown architecture
+- PromptError    the chat template refuses these messages (a mistake of the caller, never of the engine)
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of the operating errors of this package. The message is one line, fit for a log or a terminal."""


class ModelError(EngineError):
    """A model source cannot be fetched, fails its digest, or has an architecture that this engine does not run."""


class PromptError(EngineError):
    """The model's chat template raised on the given messages."""
