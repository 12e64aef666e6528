//! The previous build, from the history of the repository.

use std::path::Path;
use std::process::Command;

/// The commit whose program the hosts run before the upgrade. Replace it after each release.
const COMMIT: &str = "eebd1a655cfa0a032385d162cc355788ae2cb50e";

/// Returns the path of the previous program, which is built if it does not exist.
pub(super) fn program() -> String {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let directory = repository.join("target/upgrade-previous").join(COMMIT);
    let program = directory.join("target/debug/muster");
    if !program.exists() {
        build(repository, &directory);
    }
    program.to_str().unwrap().to_owned()
}

fn build(repository: &Path, directory: &Path) {
    let has_commit = Command::new("git")
        .current_dir(repository)
        .args(["cat-file", "-e", &format!("{COMMIT}^{{commit}}")])
        .output()
        .is_ok_and(|output| output.status.success());
    assert!(
        has_commit,
        "this clone has no commit {COMMIT}, the previous build: run `git fetch --unshallow`, and use a clone with its \
         history, not an archive"
    );
    println!("building commit {COMMIT} in {}", directory.display());
    let (source, archive) = (directory.join("source"), directory.join("source.tar"));
    // What an interrupted build left.
    let _ = std::fs::remove_dir_all(&source);
    std::fs::create_dir_all(&source).unwrap();
    run(Command::new("git").current_dir(repository).args(["archive", "--output"]).arg(&archive).arg(COMMIT));
    run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&source));
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    run(Command::new(cargo)
        .current_dir(&source)
        .args(["build", "--locked", "-p", "muster", "--target-dir"])
        .arg(directory.join("target")));
}

fn run(command: &mut Command) {
    let status = command.status().unwrap();
    assert!(status.success(), "{command:?}: {status}");
}
