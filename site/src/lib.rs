//! The documentation as a web site: pages from the Markdown files of `docs/`, which are embedded in the program. The daemon
//! serves it at `/docs/`, and `muster docs` writes it to a directory. See docs/decisions/0099.

mod markdown;
mod navigation;
mod sources;
mod template;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::path::Path;
use std::sync::LazyLock;
use std::{fs, io};

use navigation::Navigation;
use sources::SOURCES;

/// The style sheet of all pages.
const STYLE: &str = include_str!("style.css");

static NAVIGATION: LazyLock<Navigation> = LazyLock::new(Navigation::new);

/// A file of the site.
#[derive(Debug, Clone)]
pub struct SiteFile {
    /// The path below the root of the site, such as `decisions/index.html`.
    pub path: String,
    pub content_type: &'static str,
    pub content: Cow<'static, [u8]>,
}

/// Renders the whole site.
#[must_use]
pub fn files() -> Vec<SiteFile> {
    let mut files = vec![SiteFile {
        path: "style.css".into(),
        content_type: "text/css; charset=utf-8",
        content: STYLE.as_bytes().into(),
    }];
    for source in SOURCES.pages() {
        let page = markdown::render(source, &SOURCES);
        let html = template::page(&page, &NAVIGATION);
        files.push(SiteFile {
            path: source.output.clone(),
            content_type: "text/html; charset=utf-8",
            content: html.into_bytes().into(),
        });
    }
    for image in SOURCES.images() {
        let is_svg = image.output.ends_with(".svg");
        files.push(SiteFile {
            path: image.output.clone(),
            content_type: if is_svg { "image/svg+xml" } else { "image/png" },
            content: image.content.into(),
        });
    }
    files
}

/// Returns the page for a path that does not exist: the list of all pages.
#[must_use]
pub fn not_found(path: &str) -> String {
    template::not_found(path, &NAVIGATION)
}

/// Writes the site into a directory, which is created, and returns the number of files.
pub fn write(directory: &Path) -> io::Result<usize> {
    let mut files = files();
    files.push(SiteFile {
        path: "404.html".into(),
        content_type: "text/html; charset=utf-8",
        content: not_found("").into_bytes().into(),
    });
    for file in &files {
        let path = directory.join(&file.path);
        fs::create_dir_all(path.parent().unwrap_or(directory))?;
        fs::write(path, &file.content)?;
    }
    Ok(files.len())
}
