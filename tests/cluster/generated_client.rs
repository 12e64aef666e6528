//! A Python client that is generated from the OpenAPI document.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::{Mutex, PoisonError};

use crate::setup;

const GENERATOR: &str = "openapi-python-client==0.29.1";
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Returns the directory of a Python environment with some packages, one of which has `program`. It is created once in the build
/// directory. Returns `None` if it cannot be installed.
pub(crate) fn python_environment(name: &str, program: &str, packages: &[&str]) -> Option<PathBuf> {
    // Tests of one program share it.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    if !directory.join("bin").join(program).exists() {
        let environment = Command::new("python3").args(["-m", "venv"]).arg(&directory).status();
        environment.ok().filter(ExitStatus::success)?;
        let quiet = ["install", "--quiet", "--disable-pip-version-check"];
        let installed = Command::new(directory.join("bin/pip")).args(quiet).args(packages).status();
        installed.ok().filter(ExitStatus::success)?;
    }
    Some(directory)
}

/// Runs a command, which must succeed, and returns its output.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

#[test]
fn client_generated_from_the_document_manages_networks_and_instances() {
    let environment = python_environment("openapi-python-client", "openapi-python-client", &[GENERATOR]);
    let Some(python) = environment else { return muster_testing::skipped("openapi-python-client from PyPI") };
    let program = |name: &str| Command::new(python.join("bin").join(name));
    let scenario = Path::new(REPOSITORY).join("tests/cluster/generated_client");
    let directory = tempfile::tempdir().unwrap();
    let client = directory.path().join("client");
    run(program("openapi-python-client")
        .args(["generate", "--meta", "none", "--fail-on-warning", "--path"])
        .arg(Path::new(REPOSITORY).join("docs/openapi.json"))
        .arg("--output-path")
        .arg(&client)
        .arg("--config")
        .arg(scenario.join("config.yml")));
    run(program("python").args(["-m", "compileall", "-q"]).arg(&client));
    let daemon = setup(directory.path()).start();
    let output = run(program("python")
        .arg(scenario.join("scenario.py"))
        .args([daemon.url.as_str(), "system", daemon.system_key().as_str()])
        .env("PYTHONPATH", directory.path()));
    assert_eq!(output.trim(), "ok");
}
