"""Optimizer states, with numbers calculated by hand."""

import pytest

from peak_evidence import FULL, evidence, of_text, shares, tried
from plimsoll.diagnose.causes.optimizer_states import findings


def test_a_fifth_of_what_the_training_takes():
    seen = evidence(shares=shares(activations=800, optimizer_states=200), remedies=(tried("optimizer_offload"),))
    (finding,) = findings(seen)
    assert finding.title == "the states of the optimizer: 200.0 MiB, 17% of the peak"
    assert str(finding.remedy) == "optimizer_offload=1"
    assert findings(evidence(shares=shares(activations=801, optimizer_states=199))) == ()


@pytest.mark.parametrize("code", ["optimizer.step()", "self.opt.step()", "scaler.step(optimizer)", "adamw.step()"])
def test_a_text_from_the_line_of_the_update(code):
    (finding,) = findings(of_text(FULL, code=code, place="train.py:9"))
    assert (finding.place, finding.effect_bytes) == ("train.py:9", None)
    assert code in finding.evidence[0].text


@pytest.mark.parametrize("code", ["loss.backward()", "scheduler.step()", "footstep()", ""])
def test_a_text_from_another_line(code):
    assert findings(of_text(FULL, code=code)) == ()


def test_a_text_from_a_trainer_of_which_the_traceback_tells():
    above = '  File "/opt/torch/optim/adamw.py", line 232, in step\n    _multi_tensor_adamw('
    (finding,) = findings(of_text(FULL, code="trainer.train()", above=above))
    assert finding.evidence[0].text == "the line that failed: trainer.train()"
    assert findings(of_text(FULL, above='  File "/opt/torch/optim/lr_scheduler.py", line 9, in get_lr')) == ()
