from ncm_cli.options.fit import FitOptions
from ncm_cli.stages.fit import fit
from ncm_cli.store.probe import read_probe


def test_smoke(on_disk):
    report = fit(
        FitOptions(features=on_disk.features, pairs=on_disk.pairs, output=on_disk.folder / "o.safetensors")
    )
    print(report)
    probe = read_probe(on_disk.folder / "o.safetensors")
    print(probe)
