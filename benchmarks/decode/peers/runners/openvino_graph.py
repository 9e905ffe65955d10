"""Llamas as OpenVINO's models with a state, with the same weights: what OpenVINO GenAI reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as op


def write_graph(arrays: Path, kind: str, folder: Path) -> None:
    """
    Args:
        arrays (`Path`): A file of `np.savez`: every weight in float32 under its name, and "config" as JSON.
        kind (`str`): Type of its matrices: "float32", "bfloat16", "int8" (a scale for each output) or "int4" (a scale
            and a zero for each 32 inputs of an output; embeddings and the output layer in int8).
        folder (`Path`): Folder for `openvino_model.xml`, its weights, and a placeholder of a tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with np.load(arrays) as weights:
        model = Llama(dict(weights), kind).model()
        openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    openvino.save_model(_placeholder(), folder / "openvino_tokenizer.xml")


_GROUP = 32  # inputs that share a scale in int4


class Llama:
    """The graph of one model; nodes have the shapes `[batch, tokens, …]`."""

    def __init__(self, weights: dict[str, np.ndarray], kind: str):
        self.config = json.loads(str(weights.pop("config")))
        self.weights, self.kind = weights, kind
        self.sinks: list[Any] = []
        names = ("input_ids", "attention_mask", "position_ids")
        self.inputs = {name: op.parameter([-1, -1], openvino.Type.i64) for name in names}
        self.inputs["beam_idx"] = op.parameter([-1], openvino.Type.i32)
        for name, parameter in self.inputs.items():
            parameter.set_friendly_name(name)
            parameter.output(0).set_names({name})
        self.batch = self._size(self.inputs["input_ids"], 0)
        self.mask, self.rotation = self._mask(), self._rotation()

    def model(self) -> Any:
        embeddings = self._matrix("model.embed_tokens.weight")
        states = op.gather(embeddings, op.convert(self.inputs["input_ids"], "i32"), _int(0))
        for layer in range(self.config["num_hidden_layers"]):
            states = self._layer(states, f"model.layers.{layer}.")
        states = self._norm(states, "model.norm.weight")
        output = self._matrix("lm_head.weight") if "lm_head.weight" in self.weights else embeddings
        logits = op.matmul(states, output, False, True)
        logits.output(0).set_names({"logits"})
        return openvino.Model([op.result(logits)], self.sinks, list(self.inputs.values()), "llama")

    def _layer(self, states: Any, name: str) -> Any:
        attended = self._attention(self._norm(states, f"{name}input_layernorm.weight"), f"{name}self_attn.")
        states = op.add(states, attended)
        normed = self._norm(states, f"{name}post_attention_layernorm.weight")
        gate, up = (self._linear(normed, f"{name}mlp.{part}_proj.weight") for part in ("gate", "up"))
        return op.add(states, self._linear(op.multiply(op.swish(gate), up), f"{name}mlp.down_proj.weight"))

    def _attention(self, states: Any, name: str) -> Any:
        heads, groups, size = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        query = self._rotated(self._heads(states, f"{name}q_proj.weight", heads))
        key = self._kept(self._rotated(self._heads(states, f"{name}k_proj.weight", groups)), f"{name}key")
        value = self._kept(self._heads(states, f"{name}v_proj.weight", groups), f"{name}value")
        key, value = (self._repeated(item, heads // groups) for item in (key, value))
        attended = op.scaled_dot_product_attention(query, key, value, self.mask)
        joined = op.reshape(op.transpose(attended, _int(0, 2, 1, 3)), _int(0, 0, heads * size), True)
        return self._linear(joined, f"{name}o_proj.weight")

    def _heads(self, states: Any, name: str, num_heads: int) -> Any:
        """Return `[batch, heads, tokens, head_dim]`."""
        split = op.reshape(self._linear(states, name), _int(0, 0, num_heads, self.config["head_dim"]), True)
        return op.transpose(split, _int(0, 2, 1, 3))

    def _kept(self, new: Any, name: str) -> Any:
        """Return keys or values of all tokens: a state to which the new ones are added."""
        groups, size = self.config["num_key_value_heads"], self.config["head_dim"]
        empty = op.broadcast(_float(0.0), op.concat([self.batch, _int(groups), _int(0), _int(size)], 0))
        state = op.read_value(empty, name, openvino.Type.f32, openvino.PartialShape([-1, groups, -1, size]))
        kept = op.concat([op.gather(state, self.inputs["beam_idx"], _int(0)), new], 2)
        self.sinks.append(op.assign(kept, name))
        return kept

    def _repeated(self, kept: Any, times: int) -> Any:
        """Return a key-value head for each query head."""
        if times == 1:
            return kept
        groups, size = self.config["num_key_value_heads"], self.config["head_dim"]
        shape = op.concat([self.batch, _int(groups), _int(times), self._size(kept, 2), _int(size)], 0)
        spread = op.broadcast(op.unsqueeze(kept, _int(2)), shape, "BIDIRECTIONAL")
        return op.reshape(spread, _int(0, groups * times, -1, size), True)

    def _mask(self) -> Any:
        """Return `[batch, 1, tokens, all tokens]`, which is added to scores."""
        whole, new = self._size(self.inputs["attention_mask"], 1), self._size(self.inputs["input_ids"], 1)
        all_places = op.range(_scalar(0), op.squeeze(whole, _int(0)), _scalar(1), "i64")
        places = op.add(op.range(_scalar(0), op.squeeze(new, _int(0)), _scalar(1), "i64"), op.subtract(whole, new))
        earlier = op.less_equal(op.unsqueeze(all_places, _int(0)), op.unsqueeze(places, _int(1)))
        there = op.not_equal(op.unsqueeze(self.inputs["attention_mask"], _int(1, 2)), _int(0))
        seen = op.logical_and(op.unsqueeze(earlier, _int(0, 1)), there)
        return op.select(seen, _float(0.0), _float(float(np.finfo(np.float32).min)))

    def _rotation(self) -> tuple[Any, Any]:
        """Return cosines and sines, `[batch, 1, tokens, head_dim]`."""
        size, base = self.config["head_dim"], self.config["rope_theta"]
        frequencies = (base ** (-np.arange(0, size, 2) / size)).astype(np.float32)
        places = op.unsqueeze(op.convert(self.inputs["position_ids"], "f32"), _int(2))
        angles = op.multiply(places, op.constant(frequencies[None, None]))
        both = op.unsqueeze(op.concat([angles, angles], 2), _int(1))
        return op.cos(both), op.sin(both)

    def _rotated(self, heads: Any) -> Any:
        size, (cosines, sines) = self.config["head_dim"], self.rotation
        first = op.slice(heads, _int(0), _int(size // 2), _int(1), _int(3))
        second = op.slice(heads, _int(size // 2), _int(size), _int(1), _int(3))
        turned = op.concat([op.multiply(second, _float(-1.0)), first], 3)
        return op.add(op.multiply(heads, cosines), op.multiply(turned, sines))

    def _norm(self, states: Any, name: str) -> Any:
        mean = op.reduce_mean(op.power(states, _float(2.0)), _int(2), True)
        scale = op.divide(_float(1.0), op.sqrt(op.add(mean, _float(self.config["rms_norm_eps"]))))
        return op.multiply(op.constant(self.weights[name][None, None]), op.multiply(states, scale))

    def _linear(self, states: Any, name: str) -> Any:
        return op.matmul(states, self._matrix(name), False, True)

    def _matrix(self, name: str) -> Any:
        """Return `[outputs, inputs]` in float32, from the stored kind of weights."""
        weight = self.weights[name]
        if self.kind == "int4" and name.startswith("model.layers."):
            return _in_four_bits(weight)
        if self.kind == "float32":
            return op.constant(weight)
        if self.kind == "bfloat16":
            return op.convert(op.constant(weight, dtype=openvino.Type.bf16), "f32")  # exact: it comes from there
        scales = np.maximum(np.abs(weight).max(1, keepdims=True) / 127, np.finfo(np.float32).tiny)
        return op.multiply(
            op.convert(op.constant(np.rint(weight / scales).astype(np.int8)), "f32"), op.constant(scales)
        )

    def _size(self, node: Any, axis: int) -> Any:
        return op.gather(op.shape_of(node), _int(axis), _int(0))


def _in_four_bits(weight: np.ndarray) -> Any:
    """Return a matrix of codes from 0 to 15, as OpenVINO's own tools write them: less a zero, times a scale."""
    num_outputs, num_inputs = weight.shape
    groups = weight.reshape(num_outputs, num_inputs // _GROUP, _GROUP)
    lowest, highest = (np.minimum(groups.min(2, keepdims=True), 0), np.maximum(groups.max(2, keepdims=True), 0))
    scales = np.maximum((highest - lowest) / 15, np.finfo(np.float16).tiny).astype(np.float16)
    zeros = np.rint(-lowest / scales).clip(0, 15)
    codes = (np.rint(groups / scales) + zeros).clip(0, 15)
    shifted = op.subtract(op.convert(_codes(codes), "f16"), op.convert(_codes(zeros), "f16"))
    spread = op.multiply(shifted, op.constant(scales))
    return op.convert(op.reshape(spread, _int(num_outputs, num_inputs), False), "f32")


def _codes(values: np.ndarray) -> Any:
    """Return integers from 0 to 15, two in a byte."""
    pairs = values.astype(np.uint8).reshape(-1, 2)
    tensor = openvino.Tensor(openvino.Type.u4, openvino.Shape(values.shape))
    tensor.data[:] = pairs[:, 0] | pairs[:, 1] << 4
    return op.constant(tensor)


def _placeholder() -> Any:
    """
    Return a tokenizer that makes the token 0 of every text: OpenVINO compares target and draft by their tokenizers.
    """
    text = op.parameter([-1], openvino.Type.string)
    text.output(0).set_names({"string_input"})
    results = []
    for name, value in (("input_ids", 0), ("attention_mask", 1)):
        output = op.broadcast(_scalar(value), op.concat([op.shape_of(text), _int(1)], 0))
        output.output(0).set_names({name})
        results.append(op.result(output))
    return openvino.Model(results, [text], "tokenizer")


def _int(*values: int) -> Any:
    return op.constant(np.array(values, np.int64))


def _scalar(value: int) -> Any:
    return op.constant(np.array(value, np.int64))


def _float(value: float) -> Any:
    return op.constant(np.array(value, np.float32))
