//! What a test needs from its host.

/// Reports that a test cannot run here.
///
/// # Panics
/// With `MUSTER_TEST_REQUIRE_ALL=1`.
pub fn skipped(needs: &str) {
    assert!(
        std::env::var("MUSTER_TEST_REQUIRE_ALL").as_deref() != Ok("1"),
        "skipped: needs {needs}, and MUSTER_TEST_REQUIRE_ALL=1"
    );
    eprintln!("skipped: needs {needs}");
}
