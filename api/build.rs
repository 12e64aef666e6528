//! Lists the files of the web UI for `routes/ui.rs`, which embeds them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Folders below `ui/`, and the path below `/ui/` at which each is served.
const FOLDERS: [(&str, &str); 2] = [("app", ""), ("vendor", "vendor/")];

fn main() {
    // Read when the script runs: its program may have been built for another copy of the sources.
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo")).join("../ui");
    let mut lines = Vec::new();
    for (folder, prefix) in FOLDERS {
        println!("cargo::rerun-if-changed=../ui/{folder}");
        for file in files(&root.join(folder)) {
            let path =
                file.strip_prefix(root.join(folder)).expect("a file of the folder").display().to_string();
            let mut line =
                format!("(\"{prefix}{path}\", include_bytes!(concat!(env!(\"CARGO_MANIFEST_DIR\"), ");
            write!(line, "\"/../ui/{folder}/{path}\"))),").expect("a string");
            lines.push(line);
        }
    }
    lines.sort();
    let code = format!("&[\n{}\n]\n", lines.join("\n"));
    let output = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo")).join("ui_files.rs");
    fs::write(output, code).expect("the output directory is writable");
}

/// Returns the files of a folder and its subfolders that browsers load.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder of the web UI") {
        let path = entry.expect("a folder of the web UI").path();
        let extension = path.extension().unwrap_or_default().to_str();
        if path.is_dir() {
            found.extend(files(&path));
        } else if matches!(extension, Some("html" | "css" | "js" | "mjs" | "svg")) {
            found.push(path);
        }
    }
    found
}
