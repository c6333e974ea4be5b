"""Predictions in a user's program: an existing model and a function that trains it."""

import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import plimsoll
from plimsoll.errors import InputError
from plimsoll.planning.predict_step import model_bytes
from plimsoll.weights.loading.opening import entries_of

MIB = 1 << 20


def train():
    model = nn.Linear(512, 512).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        batch = torch.ones(64, 512).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_odd_sizes():
    model = nn.Linear(1300, 1300).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1300, 1300).to("cuda")).sum().backward()
        optimizer.step()


def mean_output(model, batch):
    return model(batch).mean()


def test_a_model_on_the_meta_device_needs_no_memory_and_is_counted_whole():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(16)])  # 4 GiB
    optimizer = torch.optim.SGD(model.parameters())
    prediction = plimsoll.predict(
        model, optimizer, torch.ones(4, 8192), mean_output, units="samples", device="a100-40gb"
    )
    assert prediction.parts["parameters"] == 16 * 8192 * 8192 * 4
    assert prediction.parts["gradients"] == 16 * 8192 * 8192 * 4
    assert prediction.fits
    assert not plimsoll.predict(
        model, optimizer, torch.ones(4, 8192), mean_output, units="samples", device="rtx4060"
    ).fits


def test_parts_add_up_to_the_peak_which_lies_in_its_range():
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    for device in ("cpu", "t4"):
        prediction = plimsoll.predict(
            model, torch.optim.AdamW(model.parameters()), torch.ones(32, 256), mean_output, units="samples",
            device=device,
        )  # fmt: skip
        assert sum(prediction.parts.values()) == prediction.peak.likely_bytes
        assert prediction.peak.low_bytes <= prediction.peak.likely_bytes <= prediction.peak.high_bytes
        assert prediction.device_kind == ("cpu" if device == "cpu" else "cuda")
        known_how = prediction.peak.model_dump()
        assert sum(known_how[f"{how}_bytes"] for how in ("traced", "measured", "modelled", "assumed")) == (
            prediction.peak.likely_bytes
        )


def test_a_function_is_run_as_it_is_for_a_gpu_that_is_not_here():
    prediction = plimsoll.predict_function(train, device="rtx3060")
    assert prediction.parts["parameters"] == 512 * 512 * 4 + 512 * 4
    assert prediction.subject == "train"
    assert not torch.is_autocast_enabled()


def test_the_host_holds_the_model_until_it_is_moved():
    prediction = plimsoll.predict_function(train, device="rtx3060")
    assert prediction.host.traced_bytes >= 512 * 512 * 4 + 512 * 4
    assert prediction.host.low_bytes < prediction.host.likely_bytes < prediction.host.high_bytes


def test_a_function_without_an_update_is_refused():
    with pytest.raises(InputError, match=r"made \d+ ops but no optimizer.step\(\): train three steps in it"):
        plimsoll.predict_function(lambda: nn.Linear(4, 4)(torch.ones(2, 4)), device="t4")


def test_a_negative_or_unreadable_budget_is_refused():
    for budget in ("-3GiB", "much", "0"):
        with pytest.raises(InputError, match="size"):
            plimsoll.predict_function(train, device="t4", budget=budget)


def test_a_model_of_outside_is_refused_and_stays_as_it_was():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()

    def fine_tune():
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for device in ("cpu", "t4"):
        with pytest.raises(
            InputError, match=r"made before the training is trained in it at .*test_planning_predict_step.py"
        ):
            plimsoll.predict_function(fine_tune, device=device)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_data_of_outside_may_be_read():
    data = torch.ones(64, 512)
    before = data.clone()

    def learn():
        model = nn.Linear(512, 512).to("cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(data.to("cuda")).sum().backward()
            optimizer.step()

    assert plimsoll.predict_function(learn, device="t4").parts["parameters"] == 512 * 512 * 4 + 512 * 4
    assert torch.equal(data, before)


def test_a_function_that_fails_says_so_with_its_place():
    def fails():
        return {}["missing"]

    with pytest.raises(InputError, match="fails fails in the .* phase.*KeyError"):
        plimsoll.predict_function(fails, device="t4")


def test_code_that_says_cuda_is_predicted_for_the_processor_too():
    assert plimsoll.predict_function(train, device="cpu").parts["parameters"] == 512 * 512 * 4 + 512 * 4


def test_random_numbers_stay_as_they_were():
    state = torch.get_rng_state()
    plimsoll.predict_function(train, device="t4")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "option",
    [{"micro_batch": 33}, {"micro_batch": "x"}, {"micro_batch": 0}]
    + [{"clip_norm": norm} for norm in (-1.0, 0.0, float("nan"))],
)
def test_a_step_that_cannot_be_is_refused(option):
    model = nn.Linear(4, 4)
    with pytest.raises(InputError, match="give"):
        plimsoll.predict(
            model, torch.optim.SGD(model.parameters()), torch.ones(32, 4), mean_output, units="samples", device="t4",
            **option,
        )  # fmt: skip


@pytest.mark.parametrize(("given", "micro_batch"), [(32, 32), (1, 1), (None, 32)])
def test_the_whole_batch_is_a_part_of_it_and_so_is_a_sample(given, micro_batch):
    model = nn.Linear(4, 4)
    prediction = plimsoll.predict(
        model, torch.optim.SGD(model.parameters()), torch.ones(32, 4), mean_output, units="samples", device="t4",
        micro_batch=given, clip_norm=0.5,
    )  # fmt: skip
    assert (prediction.micro_batch, prediction.batch_size, prediction.sequence_length) == (micro_batch, 32, None)


def test_samples_are_as_long_as_their_longest_tokens():
    model = nn.Embedding(9, 4)
    batch = {
        "ids": torch.zeros(3, 7, dtype=torch.long), "more": torch.zeros(3, 5, dtype=torch.long),
        "labels": torch.zeros(3, dtype=torch.long), "features": torch.zeros(3, 50),
        "pairs": torch.zeros(3, 60, 2, dtype=torch.long),
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters())
    prediction = plimsoll.predict(
        model, optimizer, batch, lambda model, batch: model(batch["ids"]).mean(), units="samples", device="t4"
    )
    assert prediction.sequence_length == 7


def test_a_model_and_its_states_are_counted_once_and_only_what_is_in_the_host_s_memory():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    own_bytes = 4 * (8 * 8 + 4 * 8 + 2 * 8) + 8  # a shared weight; biases and a norm; its statistics and their count
    assert model_bytes(model, optimizer) == own_bytes
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert model_bytes(model, optimizer) == own_bytes + 2 * 4 * (8 * 8 + 4 * 8) + 5 * 4  # and five step counts
    shapes = nn.Linear(8, 8, device="meta")
    assert model_bytes(shapes, torch.optim.SGD(shapes.parameters())) == 0


class Experts(nn.Module):
    """A layer of 4 experts; each gets the tokens that chose it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]).relu())
        return out


def test_what_is_mapped_from_a_file_is_private_memory_only_where_it_learns(tmp_path):
    sizes = {"table": (1 << 20,), "head": (1 << 18,)}
    save_file({name: torch.ones(size) for name, size in sizes.items()}, tmp_path / "weights")
    mapped = {entry.name: entry.mapped() for entry in entries_of(tmp_path / "weights")}

    def predicted(weights, *learning):
        model = nn.ParameterDict({name: nn.Parameter(one, name in learning) for name, one in weights.items()})
        optimizer = torch.optim.SGD([model[name] for name in learning], lr=0.1)

        def loss(model, batch):
            return (model["table"].sum() * model["head"] * batch["x"].sum()).mean()

        options = {"units": "samples", "device": "cpu", "micro_batch": 2}
        found = plimsoll.predict(model, optimizer, {"x": torch.ones(2, 3)}, loss, **options)
        return max(found.timeline.categories["parameters"])

    in_memory = {name: one.clone() for name, one in mapped.items()}
    (table_bytes, head_bytes) = (4 << 20, 1 << 20)
    assert predicted(in_memory, "head") == table_bytes + head_bytes
    assert predicted(mapped, "head") == head_bytes
    assert predicted(mapped, "head", "table") == table_bytes + head_bytes


def test_where_the_router_decides_the_range_goes_from_one_token_to_all():
    model = Experts()
    prediction = plimsoll.predict(
        model, torch.optim.SGD(model.parameters()), torch.ones(4096, 64), mean_output, units="samples", device="t4"
    )
    (assumption,) = [one for one in prediction.assumptions if "keep every element" in one.text][:1]
    one_expert_bytes = 4096 * 64 * 4
    assert assumption.low_bytes < -4 * one_expert_bytes
    assert prediction.allocated.low_bytes < prediction.allocated.likely_bytes + assumption.low_bytes + one_expert_bytes


def test_two_predictions_at_once_wait_for_each_other():
    answers = []
    alone = plimsoll.predict_function(train, device="t4").peak

    def predict_it():
        answers.append(plimsoll.predict_function(train, device="t4").peak)

    threads = [threading.Thread(target=predict_it) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [alone] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_said_to_be_traced_as_if_it_were_not():
    model = torch.compile(nn.Linear(4, 4))
    prediction = plimsoll.predict(
        model, torch.optim.SGD(model.parameters()), torch.ones(32, 4), mean_output, units="samples", device="t4"
    )
    assert "the model is compiled, and was traced as if it were not" in [one.text for one in prediction.assumptions]


def test_the_allocators_settings_count(monkeypatch):
    def reserved_bytes(settings):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
        return plimsoll.predict_function(train_odd_sizes, device="t4").reserved.likely_bytes

    assert reserved_bytes("roundup_power2_divisions:2") > reserved_bytes("expandable_segments:False")
    with pytest.raises(InputError, match="garbage"):
        reserved_bytes("garbage:1")


def test_a_teacher_of_outside_may_be_asked():
    teacher = nn.Linear(512, 512)

    def distil():
        model = nn.Linear(512, 512).to("cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            batch = torch.ones(64, 512).to("cuda")
            with torch.no_grad():
                wanted = teacher(batch)
            (model(batch) - wanted).pow(2).mean().backward()
            optimizer.step()

    assert plimsoll.predict_function(distil, device="t4").fits
    assert teacher.weight.grad is None


def test_a_sequence_that_is_too_long_for_cudnn_is_refused_on_a_gpu_and_predicted_on_the_cpu():
    model = nn.LSTM(2, 2, batch_first=True)
    optimizer, batch = torch.optim.SGD(model.parameters()), torch.ones(1, 65_536, 2)

    def loss(model, batch):
        return model(batch)[0].mean()

    with pytest.raises(InputError, match="a sequence of 65,536 steps: cuDNN takes at most 65,535"):
        plimsoll.predict(model, optimizer, batch, loss, units="samples", device="rtx3060")
    assert plimsoll.predict(model, optimizer, batch, loss, units="samples", device="cpu").peak.likely_bytes
