//! Files that are generated from code and committed, so that changes of an interface are visible in reviews.

use std::path::Path;

/// Compares a file of the repository with its generated content. With `MUSTER_TEST_UPDATE=1` it is written first. `test` is
/// the command line that does so.
///
/// # Panics
/// When the file differs.
pub fn assert_committed(path: &str, generated: &str, test: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if std::env::var("MUSTER_TEST_UPDATE").is_ok() {
        std::fs::create_dir_all(file.parent().expect("a path in a directory"))
            .expect("a directory of the repository");
        std::fs::write(&file, generated).expect("a file of the repository");
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(committed == generated, "{path} is stale: run MUSTER_TEST_UPDATE=1 cargo test {test}");
}
