"""Drafters learn by what they would draft, in a copy of their own; what drafts changes as a whole."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_smartspec.candidates.committed import LAST
from hf_smartspec.online.samples import Batch
from hf_smartspec.online.students import DraftStudent, EagleStudent, MedusaStudent, check_student

from ..models import VOCAB_SIZE, new_model
from .helpers import KINDS, new_drafter, new_target, samples_of, student_with

CPU = torch.device("cpu")


@pytest.fixture
def target():
    return new_target()


def batch_of(target, student, num=3, **options):
    return Batch.of(samples_of(target, num, student.hidden_layers), CPU, **options)


def test_a_draft_model_says_what_it_would_draft(target):
    student = student_with(new_drafter("draft", target))
    assert isinstance(student, DraftStudent)
    batch = batch_of(target, student)
    (found,) = student.predictions(batch)
    wanted = student.module(batch.ids).logits[:, 4:-1].flatten(0, 1)
    torch.testing.assert_close(found.logits, wanted)
    assert found.where.sum() == 36 and not found.where[:, :5].any()


def test_medusa_heads_say_what_they_would_draft(target):
    student = student_with(new_drafter("medusa", target))
    assert isinstance(student, MedusaStudent)
    batch = batch_of(target, student)
    for head, found in enumerate(student.predictions(batch)):
        # Behind the prompt's last token, and each of the response while so many follow.
        states = batch.hidden[LAST][:, 4 : -head - 2].flatten(0, 1)
        torch.testing.assert_close(found.logits, student.module(states)[:, head])
        places = found.where.nonzero()[:, 1].reshape(3, -1)
        assert (places == torch.arange(5 + head + 1, 17)).all()


def test_eagle_heads_say_what_they_would_draft(target):
    student = student_with(new_drafter("eagle3", target))
    assert isinstance(student, EagleStudent)
    batch = batch_of(target, student)
    for step, found in enumerate(student.predictions(batch)):
        places = found.where.nonzero()[:, 1].reshape(3, -1)
        assert (places == torch.arange(5 + step, 17)).all()
        assert found.logits.shape == (places.numel(), len(student.own_ids))


@pytest.mark.parametrize("kind", KINDS)
def test_where_only_errors_count_nothing_else_is_learnt(target, kind):
    student = student_with(new_drafter(kind, target))
    samples = samples_of(target, 2, student.hidden_layers)
    for sample in samples:
        sample.errors[[7, 9]] = True
    everywhere = list(student.predictions(Batch.of(samples, CPU)))
    for found, whole in zip(student.predictions(Batch.of(samples, CPU, only_errors=True)), everywhere):
        assert found.where.nonzero()[:, 1].tolist() == [12, 14, 12, 14]
        torch.testing.assert_close(found.logits, whole.logits[found.where[whole.where]])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(target, kind):
    student = student_with(new_drafter(kind, target))
    short, long = samples_of(target, 1, student.hidden_layers), samples_of(target, 1, student.hidden_layers, length=30)
    alone, together = Batch.of(short, CPU), Batch.of(short + long, CPU)
    for one, both in zip(student.predictions(alone), student.predictions(together)):
        rows = both.where.nonzero()[:, 0]
        torch.testing.assert_close(one.logits, both.logits[rows == 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_learning_changes_what_drafts_only_when_it_is_told_to(target, kind):
    drafter = new_drafter(kind, target)
    others = {name: item.clone() for name, item in target.state_dict().items()}
    live = {name: item.clone() for name, item in drafter.state_dict().items()}
    versions = [item._version for item in drafter.parameters()]
    student = student_with(drafter)
    student.take([item + 1 for item in student.weights()])
    assert all(torch.equal(item, live[name]) for name, item in drafter.state_dict().items())
    student.publish(student.weights())
    assert all(torch.equal(item, others[name]) for name, item in target.state_dict().items())
    learnt = {name for name, _ in student.parameters}
    for name, item in drafter.named_parameters():
        assert torch.equal(item, live[name] + 1 if name in learnt else live[name])
    assert learnt and all(not torch.equal(drafter.get_parameter(name), live[name]) for name in learnt)
    # Whoever keeps something that was computed with the old weights can see it.
    assert sum(new > old for new, old in zip((p._version for p in drafter.parameters()), versions)) == len(learnt)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_of_a_draft_with_adapters_these_alone_learn(target):
    draft = get_peft_model(new_drafter("draft", target), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    student = student_with(draft.get_base_model())
    assert student.parameters and all("lora_" in name for name, _ in student.parameters)


def test_drafters_in_half_precision_learn_in_float32(target):
    drafter = new_drafter("draft", target).bfloat16()
    student = student_with(drafter)
    assert all(item.dtype == torch.float32 for _, item in student.parameters)
    student.publish([item + 1e-5 for item in student.weights()])
    assert drafter.dtype == torch.bfloat16


def test_tokens_of_a_smaller_vocabulary(target):
    student = student_with(new_drafter("eagle3", target))
    assert student.own(torch.tensor([0, 1, 2, 96, 95])).tolist() == [0, -1, 1, 48, -1]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 5.0}),
    ],
)
def test_logits_are_scaled_and_capped_as_the_model_does(target, architecture, options):
    draft = new_model(architecture, **options)
    student = student_with(draft)
    batch = batch_of(target, student)
    (found,) = student.predictions(batch)
    torch.testing.assert_close(found.logits, draft(batch.ids).logits[:, 4:-1].flatten(0, 1))


# What cannot learn is refused before anything begins


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_a_draft_that_shares_weights_with_the_target_is_refused(target):
    with pytest.raises(ValueError, match=r"`model\.embed_tokens\.weight` of LlamaForCausalLM is the target's own"):
        check_student(target, target)
    draft = new_drafter("draft", target)
    check_student(draft, target)
    draft.set_output_embeddings(target.get_output_embeddings())
    with pytest.raises(ValueError, match=r"`lm_head\.weight` of LlamaForCausalLM is the target's own"):
        check_student(draft, target)
    # Of what only adapters change, the rest may be shared.
    draft = get_peft_model(draft, LoraConfig(r=2, target_modules=["q_proj"]))
    check_student(draft.get_base_model(), target)


def test_heads_may_use_the_targets_output(target):
    for kind in ("medusa", "eagle3"):
        check_student(new_drafter(kind, target), target)


def test_what_is_not_in_floating_numbers_is_refused(target):
    draft = new_drafter("draft", target)
    draft.hf_quantizer = object()
    with pytest.raises(ValueError, match="LlamaForCausalLM is quantized"):
        check_student(draft, target)
    draft = new_drafter("draft", target)
    draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"`lm_head\.weight` of LlamaForCausalLM holds torch\.int8"):
        check_student(draft, target)
    draft.lm_head.to("meta")
    with pytest.raises(ValueError, match="is offloaded"):
        check_student(draft, target)


def test_kinds_that_cannot_learn_are_refused(target):
    heads = new_drafter("medusa", target)
    heads.ids = torch.arange(VOCAB_SIZE).flip(0)
    with pytest.raises(ValueError, match="not ascending"):
        check_student(heads, target)
    heads = new_drafter("eagle3", target)
    del heads.parts["hidden_norm"]
    with pytest.raises(ValueError, match="EAGLE-1 and 2"):
        check_student(heads, target)
    with pytest.raises(ValueError, match="hears, or reads the target's encoder"):
        check_student(new_model("whisper"), target)


@pytest.mark.parametrize("kind", KINDS)
def test_in_inference_mode_it_learns_as_elsewhere(target, kind):
    drafter = new_drafter(kind, target)
    with torch.inference_mode():
        student = student_with(drafter)
    for where in (torch.inference_mode(), torch.no_grad()):
        with where:
            student.publish([item + 1 for item in student.live_weights()])
    assert not any(item.is_inference() for _, item in student.parameters)
    with torch.inference_mode():
        made_there = new_drafter(kind, target)
    student = student_with(made_there)
    student.publish([item + 1 for item in student.live_weights()])
