use std::process::Command;

use super::*;

fn qemu_img(arguments: &[&str]) -> Option<String> {
    let Ok(result) = Command::new("qemu-img").args(arguments).output() else {
        muster_testing::skipped("qemu-img (Debian package qemu-utils)");
        return None;
    };
    let output = String::from_utf8_lossy(&result.stdout).into_owned();
    assert!(result.status.success(), "{arguments:?}: {output}{}", String::from_utf8_lossy(&result.stderr));
    Some(output)
}

#[test]
fn qemu_img_finds_no_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let sizes = [512, 1 << 20, BYTES_PER_L1_ENTRY, BYTES_PER_L1_ENTRY + 512, 1 << 40, (1 << 45) + 512];
    for (number, size) in sizes.into_iter().enumerate() {
        for first in [None, Some(&b"something"[..])] {
            let name = path(&format!("{number}-{}", first.is_some()));
            create(Path::new(&name), size, None, first).unwrap();
            let Some(output) = qemu_img(&["check", "-f", "qcow2", &name]) else { return };
            assert!(output.starts_with("No errors were found on the image."), "{output}");
            let Some(output) = qemu_img(&["info", "-f", "qcow2", "--output=json", &name]) else { return };
            let output: serde_json::Value = serde_json::from_str(&output).unwrap();
            assert_eq!(output["virtual-size"], size);
            assert_eq!(output["dirty-flag"], false);
        }
    }
    let disk = path("raw");
    if qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &path("1-true"), &disk]).is_none() {
        return;
    }
    let disk = std::fs::read(disk).unwrap();
    assert!(disk.starts_with(b"something\0") && disk[9..].iter().all(|byte| *byte == 0));
}

#[test]
fn image_with_backing_file_shows_its_content_and_may_be_larger() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let mut data = vec![0x5a; 1 << 20];
    std::fs::write(path("base"), &data).unwrap();
    let backing = BackingFile { name: "base", format: "raw" };
    create(Path::new(&path("top")), 3 << 20, Some(backing), None).unwrap();
    let Some(output) = qemu_img(&["info", "--output=json", &path("top")]) else { return };
    let output: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(
        (&output["backing-filename"], &output["backing-filename-format"]),
        (&"base".into(), &"raw".into())
    );
    if qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &path("top"), &path("out")]).is_none() {
        return;
    }
    data.resize(3 << 20, 0);
    assert!(std::fs::read(path("out")).unwrap() == data);
    assert_eq!(virtual_size(Path::new(&path("top"))).unwrap(), 3 << 20);
    assert!(virtual_size(Path::new(&path("base"))).is_err());
}

#[test]
fn removes_only_the_backing_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    std::fs::write(path("base"), vec![0x5a; 1 << 20]).unwrap();
    let backing = BackingFile { name: "base", format: "raw" };
    create(Path::new(&path("ours")), 1 << 20, Some(backing), Some(b"something")).unwrap();
    let create = ["create", "-f", "qcow2", "-b", "base", "-F", "raw"];
    if qemu_img(&[&create[..], &[&path("theirs")]].concat()).is_none() {
        return;
    }
    for name in ["ours", "theirs"] {
        let name = path(name);
        remove_backing_file(Path::new(&name)).unwrap();
        let output = qemu_img(&["info", "--output=json", &name]).unwrap();
        assert!(!output.contains("backing"), "{output}");
        qemu_img(&["check", "-f", "qcow2", &name]).unwrap();
        let file = File::open(&name).unwrap();
        let size = file.metadata().unwrap().len();
        let mut head = vec![0; 65536];
        file.read_exact_at(&mut head, 0).unwrap();
        super::super::format::detect(&head, size).unwrap();
    }
    assert!(remove_backing_file(Path::new(&path("base"))).is_err());
}

#[test]
fn never_overwrites_an_existing_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, "mine").unwrap();
    assert!(create(&path, 1 << 20, None, None).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    assert!(create(&dir.path().join("huge"), u64::MAX, None, None).is_err());
}
