//! Other programs, and the kernel, read the discs that we write.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use proptest::prelude::*;

use super::*;

fn file(path: &str, content: &[u8]) -> DriveFile {
    DriveFile { path: path.into(), content: content.to_vec() }
}

/// What a guest gets.
fn usual() -> Vec<DriveFile> {
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

fn written(files: &[DriveFile]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.iso");
    write(&path, files).unwrap();
    (folder, path.to_string_lossy().into_owned())
}

/// Every file below a folder, by its path.
fn tree(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(at) = folders.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
                found.insert(name, fs::read(path).unwrap());
            }
        }
    }
    found
}

fn expected(files: &[DriveFile]) -> BTreeMap<String, Vec<u8>> {
    files.iter().map(|file| (file.path.clone(), file.content.clone())).collect()
}

/// What xorriso finds on a disc when it reads it in one way; nothing without xorriso.
fn extracted(disc: &str, way: &str) -> Option<BTreeMap<String, Vec<u8>>> {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("out");
    let arguments =
        ["-abort_on", "WARNING", "-osirrox", "on", "-read_fs", way, "-indev", disc, "-extract", "/"];
    let output = match Command::new("xorriso").args(arguments).arg(&to).output() {
        Ok(output) => output,
        Err(_) => {
            muster_testing::skipped("xorriso");
            return None;
        }
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let writable = Command::new("chmod").args(["-R", "u+w"]).arg(&to).status().unwrap();
    assert!(writable.success());
    Some(tree(&to))
}

#[test]
fn another_program_finds_every_file_under_each_kind_of_names() {
    let (_folder, disc) = written(&usual());
    for way in ["any", "nojoliet", "norock"] {
        let Some(found) = extracted(&disc, way) else { return };
        assert_eq!(found, expected(&usual()), "{way}");
    }
}

#[test]
fn guests_know_it_by_its_label() {
    let (_folder, disc) = written(&usual());
    let Ok(output) = Command::new("/usr/sbin/blkid").args(["-p", "-o", "export", &disc]).output() else {
        return muster_testing::skipped("blkid");
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for line in ["LABEL=config-2", "TYPE=iso9660"] {
        assert!(said.lines().any(|said| said == line), "{said}");
    }
}

#[test]
fn who_knows_neither_extension_finds_plain_names() {
    let (folder, disc) = written(&usual());
    let mut bytes = fs::read(&disc).unwrap();
    // Without the descriptor of Joliet: the end of the descriptors comes in its place.
    bytes.copy_within((FIRST + 2) * SECTOR..(FIRST + 3) * SECTOR, (FIRST + 1) * SECTOR);
    let plain = folder.path().join("plain.iso");
    fs::write(&plain, bytes).unwrap();
    let Some(found) = extracted(&plain.to_string_lossy(), "norock") else { return };
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
fn the_same_files_make_the_same_bytes_and_a_drive_is_replaced() {
    let (folder, path) = written(&usual());
    let before = fs::read(&path).unwrap();
    assert_eq!(before.len() % SECTOR, 0);
    write(Path::new(&path), &usual()).unwrap();
    assert!(fs::read(&path).unwrap() == before);
    write(Path::new(&path), &usual()[..1]).unwrap();
    assert!(fs::read(&path).unwrap() != before);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn many_files_and_long_names_are_no_problem() {
    let long = "n".repeat(255);
    let mut files: Vec<DriveFile> =
        (0..200).map(|n| file(&format!("many/file number {n:03}.text"), &[n])).collect();
    files.extend((0..20).map(|n| file(&format!("long/{}{n:02}", &long[..253]), &[n])));
    files.push(file(&long, &vec![7; 3 << 20]));
    files.push(file("a/b/c/d/e/f/g/h", b"deep"));
    files.push(file("füße/naïve.txt", b"letters"));
    let (_folder, disc) = written(&files);
    let Some(found) = extracted(&disc, "any") else { return };
    assert!(found == expected(&files));
    // Joliet cannot have all of the long names, but it has all of the files.
    let Some(found) = extracted(&disc, "norock") else { return };
    assert_eq!(found.len(), files.len());
    assert_eq!(found["füße/naïve.txt"], b"letters");
}

#[test]
fn what_has_no_place_on_a_disc_is_refused() {
    let long = "n".repeat(256);
    for path in ["", "/x", "x/", "a//b", "../x", "a/./b", "a\0b", "a/b/c/d/e/f/g/h/i", &long] {
        assert!(matches!(disc(&[file(path, b"")]), Err(Error::Invalid(_))), "{path:?}");
    }
    for twice in [["a", "a"], ["a", "a/b"], ["a/b", "a"]] {
        let files = twice.map(|path| file(path, b""));
        assert!(matches!(disc(&files), Err(Error::Invalid(_))), "{twice:?}");
    }
    assert!(disc(&[]).is_ok());
}

fn name() -> impl Strategy<Value = String> {
    proptest::string::string_regex("[a-zA-Z0-9_ .-]{1,40}")
        .unwrap()
        .prop_filter("a name", |name| !matches!(name.as_str(), "." | ".."))
}

fn files() -> impl Strategy<Value = Vec<DriveFile>> {
    let path = proptest::collection::vec(name(), 1..5).prop_map(|parts| parts.join("/"));
    let content = proptest::collection::vec(any::<u8>(), 0..5000);
    proptest::collection::vec((path, content), 0..12).prop_map(|files| {
        let files = files.into_iter().map(|(path, content)| DriveFile { path, content });
        // Only those that fit with those before them.
        files.fold(Vec::new(), |mut kept, file| {
            kept.push(file);
            if disc(&kept).is_err() {
                kept.pop();
            }
            kept
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whatever_the_files_another_program_finds_them(files in files()) {
        let (_folder, disc) = written(&files);
        let Some(found) = extracted(&disc, "nojoliet") else { return Ok(()) };
        prop_assert!(found == expected(&files));
        let Some(found) = extracted(&disc, "norock") else { return Ok(()) };
        prop_assert_eq!(found.len(), files.len());
    }
}
