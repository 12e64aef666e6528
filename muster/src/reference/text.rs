//! Text of the generated pages.

/// The first lines of every page after its title.
pub(super) const NOTICE: &str = "This page is generated from the source code of this version.";

/// Returns text as the content of a table's cell, in one line.
pub(super) fn cell(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    text.replace('|', "\\|").replace('<', "\\<").replace('*', "\\*")
}

/// Returns text in code style as the content of a table's cell, or nothing.
pub(super) fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{}`", text.replace('|', "\\|")) }
}
