//! Lists the pages and images of the documentation for `sources.rs`, which embeds them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The pages outside the directory `docs/`.
const ROOT_PAGES: [&str; 2] = ["ARCHITECTURE.md", "CONTRIBUTING.md"];

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut paths: Vec<String> = ROOT_PAGES.map(str::to_owned).into();
    for file in files(&root.join("docs")) {
        paths.push(file.strip_prefix(&root).expect("a file of the repository").display().to_string());
    }
    paths.sort();
    for path in ROOT_PAGES.iter().chain(&["docs"]) {
        println!("cargo::rerun-if-changed=../{path}");
    }
    let mut code = String::from("&[\n");
    for path in paths {
        let content = format!("include_bytes!(concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/../{path}\"))");
        writeln!(code, "(\"{path}\", {content}),").expect("a string");
    }
    code.push_str("]\n");
    let output = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo")).join("files.rs");
    fs::write(output, code).expect("the output directory is writable");
}

/// Returns the pages and images of a directory and its subdirectories.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory of the documentation") {
        let path = entry.expect("a directory of the documentation").path();
        let extension = path.extension().unwrap_or_default().to_str();
        if path.is_dir() {
            found.extend(files(&path));
        } else if matches!(extension, Some("md" | "png" | "svg")) {
            found.push(path);
        }
    }
    found
}
