"""Checks the files of the examples: check.py INTEGRATIONS SCHEMA, with the schema of cloud-init's user data."""

import json
import pathlib
import sys

import hcl2
import jsonschema
import yaml


def main(directory, schema):
    root = pathlib.Path(directory)
    validator = jsonschema.Draft4Validator(json.loads(pathlib.Path(schema).read_text()))
    assert list(validator.iter_errors({"users": 7, "runcmd": {}})), "the schema accepts everything"
    files = [*sorted((root / "cloud-init").glob("*.yaml")), root / "github-actions/runner.yaml"]
    assert len(files) > 3, files
    for file in files:
        text = file.read_text()
        assert text.startswith("#cloud-config\n"), file
        errors = [f"{list(error.path)}: {error.message}" for error in validator.iter_errors(yaml.safe_load(text))]
        assert not errors, f"{file}: {errors}"

    with open(root / "terraform/main.tf") as file:
        configuration = hcl2.load(file)
    types = {name.strip('"') for resource in configuration["resource"] for name in resource if name != "__is_block__"}
    assert types == {"terraform_data"}, f"{types}: only the built-in type needs no provider"

    workflow = yaml.safe_load((root / "github-actions/workflow.yml").read_text())
    assert list(workflow["jobs"]) == ["start", "build", "stop"], workflow["jobs"]
    for job, script in [("start", "start-runner"), ("stop", "stop-runner")]:
        commands = [step["run"] for step in workflow["jobs"][job]["steps"] if "run" in step]
        assert any(command.split()[0] == f"integrations/github-actions/{script}" for command in commands), commands
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
