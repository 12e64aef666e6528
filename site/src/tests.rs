//! The pages as a whole: links, anchors, images, headings, and that each page can be found. Also that the tests exist that
//! pages name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use pulldown_cmark::{Event, HeadingLevel, Tag, TagEnd};

use super::*;
use crate::markdown::{Page, Target, parse, relative, render, resolve, slug};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn pages() -> Vec<Page<'static>> {
    SOURCES.pages().map(|source| render(source, &SOURCES)).collect()
}

#[test]
fn links_lead_to_pages_sections_images_and_files_that_exist() {
    let pages = pages();
    let ids: BTreeMap<&str, BTreeSet<&str>> = pages
        .iter()
        .map(|page| {
            (page.source.output.as_str(), page.headings.iter().map(|heading| heading.id.as_str()).collect())
        })
        .collect();
    let images: BTreeSet<&str> = SOURCES.images().map(|image| image.output.as_str()).collect();
    let mut problems = Vec::new();
    for page in &pages {
        for link in &page.links {
            let is_valid = match &link.target {
                Target::External(url) => url.starts_with("https://") && !link.is_image,
                Target::Site { output, anchor } if link.is_image => {
                    images.contains(output.as_str()) && anchor.is_empty()
                }
                Target::Site { output, anchor } => {
                    images.contains(output.as_str())
                        || ids
                            .get(output.as_str())
                            .is_some_and(|ids| anchor.is_empty() || ids.contains(anchor.as_str()))
                }
                Target::Repository(path) => !link.is_image && repository().join(path).exists(),
            };
            if !is_valid || link.text.trim().is_empty() {
                problems.push(format!("{}: [{}] {:?}", page.source.path, link.text, link.target));
            }
        }
    }
    assert!(problems.is_empty(), "broken links, or links without a text:\n{}", problems.join("\n"));
}

#[test]
fn links_of_the_readme_lead_to_files_and_sections_that_exist() {
    let readme = std::fs::read_to_string(repository().join("README.md")).unwrap();
    let mut count = 0;
    for event in parse(&readme) {
        let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) = event else { continue };
        count += 1;
        match resolve("README.md", &dest_url, &SOURCES) {
            Target::External(url) => assert!(url.starts_with("https://"), "{url}"),
            Target::Site { .. } => {}
            Target::Repository(path) => assert!(repository().join(&path).exists(), "{path} does not exist"),
        }
    }
    assert!(count > 3, "{count}");
}

#[test]
fn every_page_has_one_title_and_headings_that_skip_no_level() {
    for page in pages() {
        let path = &page.source.path;
        let levels: Vec<HeadingLevel> = page.headings.iter().map(|heading| heading.level).collect();
        assert_eq!(levels.first(), Some(&HeadingLevel::H1), "{path} does not begin with its title");
        assert_eq!(
            levels.iter().filter(|level| **level == HeadingLevel::H1).count(),
            1,
            "{path} has several titles"
        );
        for (before, heading) in levels.iter().zip(&page.headings[1..]) {
            let skips = heading.level as usize > *before as usize + 1;
            assert!(!skips, "{path}: the heading {:?} skips a level", heading.text);
            assert!(!heading.id.is_empty(), "{path}: {heading:?}");
        }
    }
}

#[test]
fn navigation_names_every_page() {
    let listed: BTreeSet<&str> = NAVIGATION.entries().map(|entry| entry.output.as_str()).collect();
    assert!(NAVIGATION.sections.iter().all(|section| !section.entries.is_empty()), "a section without pages");
    for source in SOURCES.pages() {
        let is_decision = source.output.starts_with("decisions/") && source.output != "decisions/index.html";
        let is_index = source.path == navigation::INDEX;
        assert!(
            is_decision || is_index || listed.contains(source.output.as_str()),
            "docs/index.md does not name {}: add a link to one of its sections",
            source.path
        );
    }
}

#[test]
fn list_of_decisions_names_every_decision() {
    let list = SOURCES.page("docs/decisions/index.md").unwrap();
    let links = render(list, &SOURCES).links;
    let count = std::fs::read_dir(repository().join("docs/decisions")).unwrap().count();
    assert_eq!(links.len(), count);
    assert!(links.iter().all(|link| link.text.starts_with(|c: char| c.is_ascii_digit())), "{links:?}");
}

#[test]
fn pages_have_no_raw_html_and_every_image_a_description() {
    for source in SOURCES.pages() {
        for event in parse(&source.markdown) {
            assert!(!matches!(event, Event::Html(_) | Event::InlineHtml(_)), "{}: {event:?}", source.path);
        }
        for link in render(source, &SOURCES).links.iter().filter(|link| link.is_image) {
            assert!(link.text.len() > 3, "{}: an image has no description", source.path);
        }
    }
}

#[test]
fn documents_have_no_scripts_and_no_inline_styles() {
    let files = files();
    assert!(files.len() > 50, "{}", files.len());
    for file in files.iter().filter(|file| file.path.ends_with(".html")) {
        let html = std::str::from_utf8(&file.content).unwrap();
        for forbidden in
            ["<script", " style=", "<style", " onclick=", "javascript:", "src=\"http", "href=\"/"]
        {
            assert!(!html.contains(forbidden), "{} contains {forbidden}", file.path);
        }
        for required in ["<title>", "aria-label=\"Pages\"", "href=\"#content\"", "style.css\">"] {
            assert!(html.contains(required), "{} lacks {required}", file.path);
        }
        let current = html.matches("aria-current=\"page\"").count();
        assert!(current <= 1, "{} is {current} times in the navigation", file.path);
    }
}

#[test]
fn written_files_refer_to_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("site");
    let count = write(&root).unwrap();
    assert_eq!(count, files().len() + 1);
    let mut links = 0;
    for file in files().iter().filter(|file| file.path.ends_with(".html")) {
        let path = root.join(&file.path);
        let html = std::fs::read_to_string(&path).unwrap();
        for attribute in ["href=\"", "src=\""] {
            for part in html.split(attribute).skip(1) {
                let url = part.split('"').next().unwrap();
                let target = url.split('#').next().unwrap();
                if !target.is_empty() && !target.contains("://") {
                    assert!(path.parent().unwrap().join(target).exists(), "{}: {url}", file.path);
                    links += 1;
                }
            }
        }
    }
    assert!(links > 1000, "{links}");
    let missing = std::fs::read_to_string(root.join("404.html")).unwrap();
    assert!(missing.contains("href=\"up.html\"") && missing.contains("Page not found"));
}

#[test]
fn page_that_does_not_exist_lists_the_pages_relative_to_its_path() {
    assert!(not_found("nothing").contains("<li><a href=\"up.html\">"));
    assert!(not_found("decisions/nothing").contains("<li><a href=\"../up.html\">"));
    assert!(not_found("<script>/").contains("<li><a href=\"../up.html\">"));
    assert!(!not_found("<script>/").contains("<script>"));
}

#[test]
fn anchors_are_those_of_repository_hosts() {
    for (text, expected) in [
        ("muster up", "muster-up"),
        ("muster login --federated", "muster-login---federated"),
        ("GET /auth/namespaces/{ns}", "get-authnamespacesns"),
        ("What's new?", "whats-new"),
    ] {
        assert_eq!(slug(text), expected);
    }
}

#[test]
fn paths_between_files_are_relative() {
    for (from, to, expected) in [
        ("index.html", "cli.html", "cli.html"),
        ("decisions/a.html", "decisions/b.html", "b.html"),
        ("decisions/a.html", "index.html", "../index.html"),
        ("index.html", "images/a.png", "images/a.png"),
        ("reference/a.html", "images/a.png", "../images/a.png"),
    ] {
        assert_eq!(relative(from, to), expected);
    }
}

#[test]
fn repeated_headings_have_distinct_anchors() {
    for page in pages() {
        let ids: BTreeSet<&str> = page.headings.iter().map(|heading| heading.id.as_str()).collect();
        assert_eq!(ids.len(), page.headings.len(), "{}", page.source.path);
    }
}

/// Returns the words in code style of the last column of the tables of a page, row by row.
fn code_in_last_columns(markdown: &str) -> Vec<Vec<String>> {
    let (mut rows, mut cell, mut in_head) = (Vec::new(), Vec::new(), false);
    for event in parse(markdown) {
        match event {
            Event::Start(Tag::TableHead) => in_head = true,
            Event::End(TagEnd::TableHead) => in_head = false,
            Event::Start(Tag::TableCell) => cell.clear(),
            Event::Code(text) => cell.push(text.into_string()),
            Event::End(TagEnd::TableRow) if !in_head => rows.push(std::mem::take(&mut cell)),
            _ => {}
        }
    }
    rows
}

/// Returns the text of a test file, or of all files of a directory of tests.
fn text_of_tests(path: &Path) -> String {
    if !path.is_dir() {
        return std::fs::read_to_string(path).unwrap_or_default();
    }
    let entries = std::fs::read_dir(path).unwrap().map(|entry| text_of_tests(&entry.unwrap().path()));
    entries.collect()
}

/// Checks that the tests in the last column of the tables of a page exist: paths, each followed by the names of tests in it.
/// Returns the number of rows with a test and without one.
fn check_tests(page: &str) -> (usize, usize) {
    let markdown = &SOURCES.page(page).unwrap_or_else(|| panic!("{page} does not exist")).markdown;
    let (mut with_test, mut without) = (0, 0);
    for row in code_in_last_columns(markdown) {
        let is_test =
            |word: &String| word.contains("tests") || word.ends_with('/') || word.starts_with("make ");
        if !row.first().is_some_and(is_test) && !row.iter().any(|word| word.ends_with(".rs")) {
            without += 1;
            continue;
        }
        with_test += 1;
        let mut text = None;
        for word in row {
            if let Some(target) = word.strip_prefix("make ") {
                let makefile = std::fs::read_to_string(repository().join("Makefile")).unwrap();
                assert!(makefile.contains(&format!("\n{target}:")), "{page}: the Makefile has no {target}");
            } else if word.contains('/') {
                let path = repository().join(&word);
                assert!(path.exists(), "{page}: {word} does not exist");
                text = Some(text_of_tests(&path));
            } else {
                let text = text.as_ref().unwrap_or_else(|| panic!("{page}: {word} follows no path"));
                let name = word.trim_end_matches('…');
                let is_test = text.contains(&format!("fn {name}"))
                    && ["#[test]", "#[tokio::test", "on_both_engines!"]
                        .iter()
                        .any(|mark| text.contains(mark));
                assert!(is_test, "{page}: there is no test {word}");
            }
        }
    }
    (with_test, without)
}

#[test]
fn tests_that_promises_name_exist() {
    // The faults of the invariants and the settings of measurements are tables, too.
    let (with_test, without) = check_tests("docs/promises.md");
    assert!(with_test > 30, "{with_test} rows with a test, {without} without one");
}

#[test]
fn every_promise_names_a_test() {
    let markdown = &SOURCES.page("docs/promises.md").unwrap().markdown;
    let table = markdown.split("\n## ").next().unwrap();
    for row in table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| fault |")) {
        let test = row.trim_end_matches('|').rsplit(" | ").next().unwrap();
        let names_a_test = ["tests", "store/", "`make "].iter().any(|part| test.contains(part));
        assert!(names_a_test, "this promise names no test: {row}");
    }
}

#[test]
fn every_threat_names_tests_that_exist() {
    let (with_test, without) = check_tests("docs/security.md");
    assert!(with_test > 25 && without == 0, "{with_test} rows with a test, {without} without one");
}
