//! The commands of Markdown documents, which tests execute.

/// Returns the lines of the shell blocks in a Markdown document.
#[must_use]
pub fn shell_commands(document: &str) -> Vec<&str> {
    let mut inside = false;
    let mut found = vec![];
    for line in document.lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            _ if inside => found.push(line),
            _ => {}
        }
    }
    found
}

#[test]
fn extracts_commands_of_shell_blocks() {
    let document =
        "text\n```sh\nmake run\nmuster a\n```\nmuster b\n```json\n{}\n```\n```sh\nmuster c # d\n```\n";
    assert_eq!(shell_commands(document), ["make run", "muster a", "muster c # d"]);
}
