//! The files of the documentation, and where each is on the site.

use std::collections::HashMap;
use std::sync::LazyLock;

/// The path in the repository and the content of every page and image.
static FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/files.rs"));

pub(crate) static SOURCES: LazyLock<Sources> = LazyLock::new(Sources::new);

/// The directory of the design decisions, whose list is a page of the site.
const DECISIONS: &str = "docs/decisions";

/// A page.
#[derive(Debug)]
pub(crate) struct PageSource {
    /// The path in the repository.
    pub(crate) path: String,
    /// The path on the site.
    pub(crate) output: String,
    pub(crate) markdown: String,
}

/// An image.
#[derive(Debug)]
pub(crate) struct ImageSource {
    pub(crate) output: String,
    pub(crate) content: &'static [u8],
}

/// All pages and images.
#[derive(Debug)]
pub(crate) struct Sources {
    pages: Vec<PageSource>,
    images: Vec<ImageSource>,
    /// The path on the site by the path in the repository.
    outputs: HashMap<String, String>,
}

impl Sources {
    fn new() -> Self {
        let (mut pages, mut images, mut outputs) = (Vec::new(), Vec::new(), HashMap::new());
        for (path, content) in FILES {
            let output = output(path);
            outputs.insert((*path).to_owned(), output.clone());
            if path.ends_with(".md") {
                let markdown = String::from_utf8_lossy(content).into_owned();
                pages.push(PageSource { path: (*path).to_owned(), output, markdown });
            } else {
                images.push(ImageSource { output, content });
            }
        }
        let decisions = list_of_decisions(&pages);
        // Links lead to the directory, as in the repository.
        outputs.insert(DECISIONS.to_owned(), decisions.output.clone());
        pages.push(decisions);
        Self { pages, images, outputs }
    }

    pub(crate) fn pages(&self) -> impl Iterator<Item = &PageSource> {
        self.pages.iter()
    }

    pub(crate) fn images(&self) -> impl Iterator<Item = &ImageSource> {
        self.images.iter()
    }

    /// Returns the page at a path in the repository.
    pub(crate) fn page(&self, path: &str) -> Option<&PageSource> {
        self.pages.iter().find(|page| page.path == path)
    }

    /// Returns the path on the site of a file or directory of the repository, if it has one.
    pub(crate) fn output(&self, path: &str) -> Option<&str> {
        self.outputs.get(path).map(String::as_str)
    }
}

/// Returns the path of a file on the site.
fn output(path: &str) -> String {
    let (below, is_in_docs) = match path.strip_prefix("docs/") {
        Some(below) => (below, true),
        None => (path, false),
    };
    match below.strip_suffix(".md") {
        Some(name) if is_in_docs => format!("{name}.html"),
        Some(name) => format!("{}.html", name.to_lowercase()),
        None => below.to_owned(),
    }
}

/// Creates the page that lists the design decisions.
fn list_of_decisions(pages: &[PageSource]) -> PageSource {
    let mut markdown = String::from(
        "# Design decisions\n\nEach note says what was decided, why, and what the alternatives were. The code cites them.\n\n",
    );
    for page in pages {
        if let Some(name) = page.path.strip_prefix("docs/decisions/") {
            markdown.push_str(&format!("- [{}]({name})\n", title_of(&page.markdown)));
        }
    }
    PageSource { path: format!("{DECISIONS}/index.md"), output: "decisions/index.html".into(), markdown }
}

/// Returns the text of the first heading.
pub(crate) fn title_of(markdown: &str) -> String {
    let title = markdown.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or_default();
    title.replace('`', "")
}
