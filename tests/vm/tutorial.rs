//! The commands of the tutorial, from top to bottom, as a user without privileges on a new host with real guests.

use std::path::Path;
use std::process::Command;

use muster_test_cluster::{enter_vm_namespaces, tiny_image};
use muster_testing::{shell_commands, skipped};

use crate::rootless::{RootlessHost, has_pasta, processes};

#[test]
fn commands_of_the_tutorial_succeed_in_order() {
    for program in ["bash", "curl", "jq"] {
        if Command::new(program).arg("--version").output().is_err() {
            return skipped(program);
        }
    }
    if !has_pasta() {
        return skipped("pasta (Debian package passt)");
    }
    if !enter_vm_namespaces("tutorial::commands_of_the_tutorial_succeed_in_order") {
        return;
    }
    let cluster = RootlessHost::new();
    let before = cluster.inventory();
    let tutorial = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/tutorial.md");
    let tutorial = std::fs::read_to_string(tutorial).unwrap();
    let lines = shell_commands(&tutorial);
    for expected in ["muster up ", "muster exec client ", "muster forward ", "muster key add ", "muster down"]
    {
        assert!(lines.iter().any(|line| line.contains(expected)), "no {expected}in {lines:#?}");
    }
    // As after an installation: the image is found next to the program.
    let (programs, images) = (cluster.path("bin"), cluster.path("share/muster"));
    std::fs::create_dir_all(&programs).unwrap();
    std::fs::create_dir_all(&images).unwrap();
    std::fs::rename(cluster.path("muster"), programs.join("muster")).unwrap();
    std::fs::copy(tiny_image(), images.join("tiny.qcow2")).unwrap();
    let script = cluster.path("tutorial.sh");
    let prefix = format!("set -eux -o pipefail\nPATH={}:$PATH\ncd\n", programs.display());
    std::fs::write(&script, prefix + &lines.join("\n")).unwrap();

    let output = cluster.run(&format!("bash {}", script.display()));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}\n{}", cluster.log());
    // From the other guest, through the forwarded port, and from the snapshot.
    assert_eq!(stdout.matches("hello from web\n").count(), 3, "{stdout}");
    assert_eq!(processes(), Vec::<String>::new());
    assert_eq!(cluster.inventory(), before);
}
