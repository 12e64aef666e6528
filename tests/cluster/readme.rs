//! The commands of the README, from top to bottom, on a new host with real VMs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use muster_test_cluster::{SYSTEM_KEY, enter_vm_namespaces, qemu_processes, single_vm_host};
use muster_testing::shell_commands;
use serde_json::json;

use crate::released_client::installed;

/// The URL and the credentials file of the README.
const URL: &str = "http://127.0.0.1:13000";
const CREDENTIALS: &str = "/var/lib/muster/credentials.json";
/// The commands that build Muster or install packages. The cluster of the test is what `make run` starts.
const SKIPPED: [&str; 2] = ["make ", "pip install "];
/// Where images are fetched from, in place of the internet.
const IMAGE_SITE: &str = "127.0.0.1:8000";

/// Ends a process with the test.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the commands of a document, without skipped ones.
fn commands(document: &str) -> Vec<&str> {
    let mut lines = shell_commands(document);
    lines.retain(|line| !SKIPPED.iter().any(|word| line.starts_with(word)));
    lines
}

#[test]
fn commands_of_the_readme_succeed_in_order() {
    // Installed before the namespaces are entered, which have no internet access.
    let Some(client) = installed() else { return muster_testing::skipped("the released client from PyPI") };
    for program in ["bash", "curl", "jq"] {
        if Command::new(program).arg("--version").output().is_err() {
            return muster_testing::skipped(program);
        }
    }
    if !enter_vm_namespaces("readme::commands_of_the_readme_succeed_in_order") {
        return;
    }
    let cluster = single_vm_host(&[
        ("IMAGE_DOWNLOAD_URL", &format!("http://{IMAGE_SITE}")),
        ("IMAGE_FETCH_ALLOWED_NETWORKS", "127.0.0.0/8"),
    ]);
    let host = cluster.host(1);
    let home = tempfile::tempdir().unwrap();
    let image = repository().join("target/image/tiny.qcow2");
    fs::write(home.path().join("notes.txt"), "milk\n").unwrap();
    fs::copy(&image, home.path().join("disk.qcow2")).unwrap();
    fs::create_dir_all(home.path().join("site/debian:12")).unwrap();
    fs::copy(&image, home.path().join("site/debian:12/latest.qcow2")).unwrap();
    let credentials = home.path().join(".config/muster/credentials.json");
    fs::create_dir_all(credentials.parent().unwrap()).unwrap();
    let content = json!({ "namespace": "system", "key": SYSTEM_KEY, "apiurl": host.url() });
    fs::write(&credentials, content.to_string()).unwrap();

    let readme = fs::read_to_string(repository().join("README.md")).unwrap();
    let lines = commands(&readme);
    for expected in ["muster instance create ", "muster console ", "curl ", "sf-client instance create "] {
        assert!(lines.iter().any(|line| line.contains(expected)), "no {expected}in {lines:#?}");
    }
    let script =
        lines.join("\n").replace(URL, &host.url()).replace(CREDENTIALS, credentials.to_str().unwrap());
    // The instance of the released client may still be in creation.
    let script = format!("set -eux -o pipefail\n{script}\nmuster instance delete-all --yes --timeout 240\n");

    let programs = [env!("CARGO_BIN_EXE_muster").into(), client]
        .map(|file: PathBuf| file.parent().unwrap().display().to_string());
    let path = format!("{}:{}", programs.join(":"), std::env::var("PATH").unwrap_or_default());
    let directory = home.path().to_owned();
    let output = host.namespace.run(move || {
        let (address, port) = IMAGE_SITE.split_once(':').unwrap();
        let mut site = Command::new("python3");
        site.args(["-m", "http.server", "--bind", address, "--directory", "site", port]);
        site.current_dir(&directory).stdout(Stdio::null()).stderr(Stdio::null());
        let _site = ChildGuard(site.spawn().unwrap());
        let mut shell = Command::new("bash");
        shell.args(["-c", &script]).current_dir(&directory).stdin(Stdio::null());
        shell.env_clear().env("PATH", path).env("HOME", &directory).output().unwrap()
    });
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}\n{}", host.log());
    assert_eq!(qemu_processes(), []);
}
