"""The models of a server, under the interfaces of transformers' application."""

from collections.abc import Mapping
from typing import Any

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState

from .errors import ApiError
from .served import ServedModel


class ServedModels(ModelManager):
    """
    transformers' manager of models, for models that are loaded before the server starts and stay loaded.

    Args:
        models (mapping of `ServedModel`): Models by name.
    """

    def __init__(self, models: Mapping[str, ServedModel]):
        super().__init__(device="cpu", model_timeout=-1)
        self._models = models

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the name unchanged, without a revision."""
        return model_id

    def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return a served model and its tokenizer; raise `ApiError`, 404, for another name."""
        served = find(self._models, model_id_and_revision)
        return served.model, served.tokenizer

    def list_models(self, cache_dir: str | None = None) -> list[dict]:
        return [model_card(served) for served in self._models.values()]

    get_gen_models = list_models  # as transformers calls it before 5.24

    def shutdown(self) -> None:
        """Do nothing: engines hold the models as long as the server runs."""


class EngineState(GenerationState):
    """transformers' shared state, with engines instead of its continuous batching."""

    def __init__(self, models: Mapping[str, ServedModel]):
        super().__init__(continuous_batching=True)
        self.models = models

    def find(self, name: str | None) -> ServedModel:
        """Return the model of this name; the first one without a name. Raise `ApiError`, 404, for other names."""
        return find(self.models, name)

    def is_cb_alive(self) -> bool:
        return all(served.engine.is_running for served in self.models.values())

    def shutdown(self) -> None:
        for served in self.models.values():
            served.stop()


def find(models: Mapping[str, ServedModel], name: Any) -> ServedModel:
    if not name:
        return next(iter(models.values()))
    if not isinstance(name, str) or name not in models:
        raise ApiError(404, f"The model {name!r} is not served here", param="model", code="model_not_found")
    return models[name]


def model_card(served: ServedModel) -> dict[str, Any]:
    card = {"id": served.name, "object": "model", "created": served.created, "owned_by": "hf-smartspec"}
    return card | {"max_model_len": served.max_model_len}
