//! Reads config drives with other programs.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use proptest::prelude::*;

use super::*;

fn file(path: &str, content: &[u8]) -> ConfigDriveFile {
    ConfigDriveFile { path: path.into(), content: content.to_vec() }
}

/// Returns the files that a guest usually gets.
fn usual_files() -> Vec<ConfigDriveFile> {
    vec![
        file("openstack/latest/meta_data.json", br#"{"uuid": "x"}"#),
        file("openstack/latest/network_data.json", &[b' '; 5000]),
        file("openstack/latest/vendor_data.json", b"{}"),
        file("openstack/latest/vendor_data2.json", b"{}"),
        file("openstack/latest/user_data", b"#cloud-config\n"),
        file("openstack/2017-02-22/meta_data.json", br#"{"uuid": "x"}"#),
        file("openstack/2017-02-22/user_data", b""),
    ]
}

fn write_drive(files: &[ConfigDriveFile]) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.iso");
    write(&path, files).unwrap();
    (dir, path.to_string_lossy().into_owned())
}

/// Returns every file below a directory, by path.
fn read_tree(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(at) = dirs.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else {
                let name = path.strip_prefix(dir).unwrap().to_string_lossy().into_owned();
                found.insert(name, fs::read(path).unwrap());
            }
        }
    }
    found
}

fn expected(files: &[ConfigDriveFile]) -> BTreeMap<String, Vec<u8>> {
    files.iter().map(|file| (file.path.clone(), file.content.clone())).collect()
}

/// Extracts an image with xorriso, which reads names according to `mode`. Returns `None` without xorriso.
fn extract(image: &str, mode: &str) -> Option<BTreeMap<String, Vec<u8>>> {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("out");
    let arguments =
        ["-abort_on", "WARNING", "-osirrox", "on", "-read_fs", mode, "-indev", image, "-extract", "/"];
    let output = match Command::new("xorriso").args(arguments).arg(&to).output() {
        Ok(output) => output,
        Err(_) => {
            muster_testing::skipped("xorriso");
            return None;
        }
    };
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    let writable = Command::new("chmod").args(["-R", "u+w"]).arg(&to).status().unwrap();
    assert!(writable.success());
    Some(read_tree(&to))
}

#[test]
fn xorriso_finds_every_file_in_each_hierarchy() {
    let (_dir, path) = write_drive(&usual_files());
    for mode in ["any", "nojoliet", "norock"] {
        let Some(found) = extract(&path, mode) else { return };
        assert_eq!(found, expected(&usual_files()), "{mode}");
    }
}

#[test]
fn blkid_finds_the_label() {
    let (_dir, path) = write_drive(&usual_files());
    let Ok(output) = Command::new("/usr/sbin/blkid").args(["-p", "-o", "export", &path]).output() else {
        return muster_testing::skipped("blkid");
    };
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    for expected in ["LABEL=config-2", "TYPE=iso9660"] {
        assert!(stdout.lines().any(|line| line == expected), "{stdout}");
    }
}

#[test]
fn readers_without_extensions_find_iso_9660_names() {
    let (dir, path) = write_drive(&usual_files());
    let mut bytes = fs::read(&path).unwrap();
    // Replace the Joliet descriptor by the terminator.
    bytes.copy_within(
        (FIRST_DESCRIPTOR + 2) * SECTOR_SIZE..(FIRST_DESCRIPTOR + 3) * SECTOR_SIZE,
        (FIRST_DESCRIPTOR + 1) * SECTOR_SIZE,
    );
    let plain = dir.path().join("plain.iso");
    fs::write(&plain, bytes).unwrap();
    let Some(found) = extract(&plain.to_string_lossy(), "norock") else { return };
    let names: Vec<String> = found.keys().map(|name| name.to_lowercase()).collect();
    assert_eq!(
        names,
        [
            "openstack/2017_02_22/meta_data.json",
            "openstack/2017_02_22/user_data",
            "openstack/latest/meta_data.json",
            "openstack/latest/network_data.json",
            "openstack/latest/user_data",
            "openstack/latest/vendor_data.json",
            "openstack/latest/vendor_data2.json",
        ]
    );
}

#[test]
fn image_is_reproducible_and_replaces_an_existing_one() {
    let (dir, path) = write_drive(&usual_files());
    let before = fs::read(&path).unwrap();
    assert_eq!(before.len() % SECTOR_SIZE, 0);
    write(Path::new(&path), &usual_files()).unwrap();
    assert!(fs::read(&path).unwrap() == before);
    write(Path::new(&path), &usual_files()[..1]).unwrap();
    assert!(fs::read(&path).unwrap() != before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn supports_many_files_and_long_names() {
    let long = "n".repeat(255);
    let mut files: Vec<ConfigDriveFile> =
        (0..200).map(|n| file(&format!("many/file number {n:03}.text"), &[n])).collect();
    files.extend((0..20).map(|n| file(&format!("long/{}{n:02}", &long[..253]), &[n])));
    files.push(file(&long, &vec![7; 3 << 20]));
    files.push(file("a/b/c/d/e/f/g/h", b"deep"));
    files.push(file("füße/naïve.txt", b"letters"));
    let (_dir, path) = write_drive(&files);
    let Some(found) = extract(&path, "any") else { return };
    assert!(found == expected(&files));
    // Joliet shortens long names, but has all files.
    let Some(found) = extract(&path, "norock") else { return };
    assert_eq!(found.len(), files.len());
    assert_eq!(found["füße/naïve.txt"], b"letters");
}

#[test]
fn rejects_invalid_paths() {
    let long = "n".repeat(256);
    for path in ["", "/x", "x/", "a//b", "../x", "a/./b", "a\0b", "a/b/c/d/e/f/g/h/i", &long] {
        assert!(matches!(image(&[file(path, b"")]), Err(Error::Invalid(_))), "{path:?}");
    }
    for twice in [["a", "a"], ["a", "a/b"], ["a/b", "a"]] {
        let files = twice.map(|path| file(path, b""));
        assert!(matches!(image(&files), Err(Error::Invalid(_))), "{twice:?}");
    }
    assert!(image(&[]).is_ok());
}

fn name() -> impl Strategy<Value = String> {
    proptest::string::string_regex("[a-zA-Z0-9_ .-]{1,40}")
        .unwrap()
        .prop_filter("a name", |name| !matches!(name.as_str(), "." | ".."))
}

fn files() -> impl Strategy<Value = Vec<ConfigDriveFile>> {
    let path = proptest::collection::vec(name(), 1..5).prop_map(|parts| parts.join("/"));
    let content = proptest::collection::vec(any::<u8>(), 0..5000);
    proptest::collection::vec((path, content), 0..12).prop_map(|files| {
        let files = files.into_iter().map(|(path, content)| ConfigDriveFile { path, content });
        // Keep only files that are valid together with those before them.
        files.fold(Vec::new(), |mut kept, file| {
            kept.push(file);
            if image(&kept).is_err() {
                kept.pop();
            }
            kept
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn xorriso_finds_arbitrary_files(files in files()) {
        let (_dir, path) = write_drive(&files);
        let Some(found) = extract(&path, "nojoliet") else { return Ok(()) };
        prop_assert!(found == expected(&files));
        let Some(found) = extract(&path, "norock") else { return Ok(()) };
        prop_assert_eq!(found.len(), files.len());
    }
}
