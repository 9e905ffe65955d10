"""`python -m benchmarks replicas` on made-up text."""

import json

from .. import helpers


def test_all_ways_are_compared(folder, tmp_path, capsys):
    path, out = tmp_path / "texts.jsonl", tmp_path / "results.json"
    rows = [{"prompt": f"Say {n % 5} twice", "response": f"{n % 5} and {n % 5} again, which is all"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--tokenizer", folder / "target", "--replicas", "1,2", "--requests", "12", "--tenants", "4"]
    assert helpers.bench("replicas", path, *options, "--system", "32", "--json", out) == 0
    found = json.loads(out.read_text())
    assert found["is_simulated"] and set(found["results"]) == {"1 replicas", "2 replicas"}
    two = found["results"]["2 replicas"]
    assert len(two) == 6 and all(row["requests"] == 24 for row in two.values())
    assert two["affinity"]["reused_share"] > two["round robin"]["reused_share"]
    shown = capsys.readouterr().out
    assert "Simulated" in shown and "affinity" in shown and "2 replicas" in shown


def test_every_tenant_has_texts(folder, tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}", "response": "Yes"}) + "\n" for n in range(3)))
    arguments = [path, "--tokenizer", folder / "target", "--requests", "1", "--replicas", "1"]
    assert helpers.bench("replicas", *arguments) == 2
    assert "--tenants: 16 of them are to ask what is in" in capsys.readouterr().err
    assert helpers.bench("replicas", *arguments, "--tenants", "3") == 0


def test_texts_without_responses_are_refused(folder, tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"prompt": "Say something"}) + "\n")
    assert helpers.bench("replicas", path, "--tokenizer", folder / "target") == 2
    assert "response" in capsys.readouterr().err
