import sys, pathlib
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "numerics"))
import pytest
def test_pair(deploy_app, tmp_path_factory):
    from two_vocabularies import write_pair
    t, d = write_pair(tmp_path_factory.mktemp("p"))
    small = {"kv_cache_tokens": 4096, "device": "cpu", "num_threads": 1}
    texts = {}
    for source in ("model", "none"):
        draft = {"source": "model", "model": str(d), **small} if source == "model" else {"source": "none"}
        app = deploy_app(target={"model": str(t), "kernels": "torch", **small}, draft=draft, speculation={"depth": 4, "max_depth": 4, "fan_out": 2} if source == "model" else {})
        texts[source] = [app.complete("the cat sat on", temperature=temp, seed=7, max_tokens=40, ignore_eos=True)["choices"][0]["text"] for temp in (0, 1.9, 1.9)]
        m = app.client.get("/metrics").text
        print("\n".join(l for l in m.splitlines() if any(k in l for k in ("accepted", "drafted", "hits", "misses", "fallback")) and not l.startswith("#")))
        print(app.client.get("/health").text[:3000])
        print(str(app.controller())[:3000])
    assert texts["model"] == texts["none"]
    print(texts)
