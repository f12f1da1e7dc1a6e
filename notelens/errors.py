"""One error tree. Every message says what was wrong, where, and what to do about it."""


class NotelensError(Exception):
    """Base class of every error that notelens raises on purpose."""


class InputError(NotelensError, ValueError):
    """Something the caller passed cannot be used (command line exit code 2)."""


class ConfigError(InputError):
    """A configuration file is malformed; the message carries file and line where they are known."""


class FolderInUseError(InputError):
    """Another process is writing to the folder of a run."""


class UnknownNameError(InputError, KeyError):
    """A name is not in a registry; the message lists the nearest names."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MissingPackageError(NotelensError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class TaskError(InputError):
    """A task, scenario file or prompt pair does not meet its own contract."""


class SpanError(TaskError):
    """A named span cannot be located, or is located ambiguously, in the token ids."""


class PairError(TaskError):
    """Two prompts of a pair differ in length, or outside the span that may differ."""


class AnswerError(TaskError):
    """Answer words cannot be told apart by their first token with the tokenizer in use."""


class CacheError(NotelensError, ValueError):
    """A key-value cache violates an invariant or does not fit its model."""


class PatchError(InputError):
    """A patch cannot be applied: sites out of range, unequal caches, an empty band of layers."""


class ComposeError(InputError):
    """Parts cannot be joined into one context; the message names the part and the way out."""


class ArtefactError(InputError):
    """A file of cached rows is damaged, not such a file at all, or made for another model."""


class UnsupportedModelError(NotelensError):
    """The model's architecture, cache or attention path is not understood; nothing is guessed."""


class NonFiniteError(NotelensError, ArithmeticError):
    """Logits, keys or values hold NaN or infinity."""


class GateError(NotelensError):
    """The model failed its admission gate (command line exit code 3)."""


class CompetenceError(NotelensError):
    """The model does not decide the task well enough to be measured (command line exit code 3)."""


class RecordError(NotelensError, OSError):
    """A record could not be read or written; what was written before is intact."""


class EditError(InputError):
    """A cached prompt cannot be edited as asked; no other method is put in its place."""


class FieldError(EditError):
    """A field is not in the prompt, is there more often than meant, or its value cannot be used."""


class SeamError(EditError):
    """A value merges with its neighbours into other tokens, so rows outside the field would change."""


class LengthChangeError(EditError):
    """The new value has another number of tokens and the method only replaces rows one by one."""


class WindowError(EditError):
    """No layer's window reaches the rows that would be repaired, so the repair could not have an effect."""


class BudgetError(EditError):
    """A repair needs more tokens than its budget allows, or more rows than there are."""


class AgentError(InputError):
    """A session cannot do what was asked; it is as it was before the call."""


class ContextOverflowError(AgentError):
    """The prompt would need more positions than the model has; nothing was run."""


class ToolError(AgentError):
    """A tool raised, or gave back something that is no result; its error is the cause of this one."""


class CheckoutError(InputError):
    """A folder of somebody else's data is missing, or does not hold what its reader expects."""


class RefusedError(AgentError):
    """An environment refused a call because its precondition does not hold; nothing was changed."""


class ServingError(NotelensError):
    """An engine could not be started or reached, or did not answer as it should."""


class EngineUrlError(ServingError, InputError):
    """Nothing answers at an address, or what answers is no OpenAI-compatible engine."""


class EngineModelError(ServingError, InputError):
    """An engine serves another model than the one that was asked for."""


class PortInUseError(ServingError, InputError):
    """The port on which an engine is to listen is taken."""


class PrefixCacheError(ServingError, InputError):
    """An engine reuses no prefixes, or does not keep salted prompts apart."""


class RequestTimeoutError(ServingError):
    """A request took longer than its limit."""


class PartialRunError(NotelensError):
    """A benchmark ended before all was measured; what was is recorded and marked (command line exit code 4)."""


class EngineError(ServingError, InputError):
    """An engine is not set up for what is asked of it, or a request does not say it in a way that can be answered."""
