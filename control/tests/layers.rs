//! Imports between the folders of this crate point downwards only. See ARCHITECTURE.md.

use std::path::{Path, PathBuf};

/// The folders and files of the crate by layer, the lowest first. A layer imports only from layers below it.
const LAYERS: &[&[&str]] = &[
    &["exposition", "traces"],
    &["backup", "daemon_metrics", "events", "fetch", "health", "peer", "queue", "scheduler"],
    &["auth", "state"],
    &["app"],
    &["objects"],
    &["operations", "reconcile"],
    &["lib"],
];

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// Returns the modules at the root that a line names, as `crate::module` or with as many `super::` as lead to the root
/// from a module at the given depth.
fn imported_modules(line: &str, depth: usize) -> impl Iterator<Item = &str> {
    let root = "super::".repeat(depth);
    let by_name = line.split("crate::").skip(1);
    let by_steps = line.match_indices(&root).map(|(at, _)| &line[at + root.len()..]).collect::<Vec<_>>();
    by_name
        .chain(by_steps)
        .filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next())
        .filter(|module| !module.is_empty() && *module != "super")
}

#[test]
fn imports_point_downwards() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut violations = Vec::new();
    for file in sources(&root) {
        let relative = file.strip_prefix(&root).unwrap();
        let module = relative.components().next().unwrap().as_os_str().to_str().unwrap();
        let module = module.strip_suffix(".rs").unwrap_or(module);
        let depth = relative.components().count() - usize::from(relative.ends_with("mod.rs"));
        let own = layer(module).unwrap_or_else(|| panic!("{module} has no layer: add it to LAYERS"));
        for (number, line) in (1..).zip(std::fs::read_to_string(&file).unwrap().lines()) {
            if line.trim_start().starts_with("//") {
                continue;
            }
            if line.contains("crate::{") {
                violations
                    .push(format!("{}:{number}: import each module on its own line", relative.display()));
            }
            for target in imported_modules(line, depth).filter(|target| *target != module) {
                if layer(target).is_some_and(|target| target >= own) {
                    violations.push(format!("{}:{number}: {}", relative.display(), line.trim()));
                }
            }
        }
    }
    assert!(violations.is_empty(), "imports from the same or a higher layer:\n{}", violations.join("\n"));
}
