//! Renders one page of Markdown.

use std::collections::HashMap;

use pulldown_cmark::{CowStr, Event, HeadingLevel, Options, Parser, Tag, TagEnd, html};

use crate::sources::{PageSource, Sources, title_of};

/// A rendered page.
#[derive(Debug)]
pub(crate) struct Page<'a> {
    pub(crate) source: &'a PageSource,
    pub(crate) title: String,
    pub(crate) body: String,
    pub(crate) headings: Vec<Heading>,
    pub(crate) links: Vec<Link>,
}

/// A heading of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Heading {
    pub(crate) level: HeadingLevel,
    pub(crate) id: String,
    pub(crate) text: String,
}

/// A link or an image of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) target: Target,
    /// The text of a link, or the description of an image.
    pub(crate) text: String,
    /// The number of headings before it.
    pub(crate) heading: usize,
    pub(crate) is_image: bool,
}

/// Where a link leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// Another web site.
    External(String),
    /// A file of the site, by its path on the site, and an anchor in it or "".
    Site { output: String, anchor: String },
    /// A file of the repository that is not on the site, by its path in the repository.
    Repository(String),
}

pub(crate) fn parse(markdown: &str) -> impl Iterator<Item = Event<'_>> {
    Parser::new_ext(markdown, Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH)
}

pub(crate) fn render<'a>(source: &'a PageSource, sources: &Sources) -> Page<'a> {
    let mut renderer =
        Renderer { source, sources, headings: Vec::new(), links: Vec::new(), ids: HashMap::new() };
    let events = renderer.transform(&parse(&source.markdown).collect::<Vec<_>>());
    let mut body = String::new();
    html::push_html(&mut body, events.into_iter());
    let Renderer { headings, links, .. } = renderer;
    Page { source, title: title_of(&source.markdown), body, headings, links }
}

/// The state while a page is rendered.
struct Renderer<'a> {
    source: &'a PageSource,
    sources: &'a Sources,
    headings: Vec<Heading>,
    links: Vec<Link>,
    /// How often each id of a heading was used.
    ids: HashMap<String, usize>,
}

impl<'a> Renderer<'a> {
    /// Adds ids to headings, scrolling to tables, and resolves links. Raw HTML becomes text.
    fn transform(&mut self, events: &[Event<'a>]) -> Vec<Event<'a>> {
        let mut output = Vec::with_capacity(events.len());
        let mut link_is_open = false;
        for (index, event) in events.iter().enumerate() {
            let rest = &events[index + 1..];
            match event {
                Event::Start(Tag::Heading { level, .. }) => {
                    let text = text_until(rest, TagEnd::Heading(*level));
                    let id = self.unique_id(&text);
                    output.push(Event::Html(format!("<{level} id=\"{id}\">").into()));
                    self.headings.push(Heading { level: *level, id, text });
                }
                Event::End(TagEnd::Heading(level)) => {
                    let id = self.headings.last().map_or("", |heading| &heading.id);
                    let anchor = format!(
                        " <a class=\"anchor\" href=\"#{id}\" aria-label=\"Link to this section\">#</a></{level}>\n"
                    );
                    output.push(Event::Html(anchor.into()));
                }
                Event::Start(Tag::Table(_)) => {
                    output.push(Event::Html("<div class=\"table\" tabindex=\"0\">".into()));
                    output.push(event.clone());
                }
                Event::End(TagEnd::Table) => {
                    output.push(event.clone());
                    output.push(Event::Html("</div>\n".into()));
                }
                Event::Start(Tag::Link { dest_url, .. }) => {
                    let target = self.add_link(dest_url, text_until(rest, TagEnd::Link), false);
                    link_is_open = !matches!(target, Target::Repository(_));
                    output.push(Event::InlineHtml(self.opening_of_link(&target)));
                }
                Event::End(TagEnd::Link) => {
                    output.push(Event::InlineHtml(if link_is_open { "</a>" } else { "</span>" }.into()));
                }
                Event::Start(Tag::Image { link_type, dest_url, title, id }) => {
                    let target = self.add_link(dest_url, text_until(rest, TagEnd::Image), true);
                    let dest_url = self.href(&target).into();
                    output.push(Event::Start(Tag::Image {
                        link_type: *link_type,
                        dest_url,
                        title: title.clone(),
                        id: id.clone(),
                    }));
                }
                Event::Html(text) | Event::InlineHtml(text) => output.push(Event::Text(text.clone())),
                other => output.push(other.clone()),
            }
        }
        output
    }

    fn add_link(&mut self, destination: &str, text: String, is_image: bool) -> Target {
        let target = resolve(&self.source.path, destination, self.sources);
        self.links.push(Link { target: target.clone(), text, heading: self.headings.len(), is_image });
        target
    }

    fn opening_of_link(&self, target: &Target) -> CowStr<'a> {
        match target {
            Target::External(url) => format!("<a href=\"{}\" rel=\"noreferrer\">", escape(url)).into(),
            Target::Site { .. } => format!("<a href=\"{}\">", escape(&self.href(target))).into(),
            Target::Repository(path) => {
                format!("<span class=\"source\" title=\"{} in the source code\">", escape(path)).into()
            }
        }
    }

    /// Returns the URL of a target, relative to this page.
    fn href(&self, target: &Target) -> String {
        match target {
            Target::External(url) => url.clone(),
            Target::Site { output, anchor } => {
                let path = if *output == self.source.output {
                    String::new()
                } else {
                    relative(&self.source.output, output)
                };
                if anchor.is_empty() && !path.is_empty() { path } else { format!("{path}#{anchor}") }
            }
            Target::Repository(path) => path.clone(),
        }
    }

    /// Returns the id of a heading, with a number if an earlier heading has the same text.
    fn unique_id(&mut self, text: &str) -> String {
        let id = slug(text);
        let count = self.ids.entry(id.clone()).or_default();
        *count += 1;
        if *count == 1 { id } else { format!("{id}-{}", *count - 1) }
    }
}

/// Returns the text of the events before the end of an element.
fn text_until(events: &[Event<'_>], end: TagEnd) -> String {
    let mut text = String::new();
    for event in events.iter().take_while(|event| **event != Event::End(end)) {
        match event {
            Event::Text(part) | Event::Code(part) => text.push_str(part),
            Event::SoftBreak | Event::HardBreak => text.push(' '),
            _ => {}
        }
    }
    text
}

/// Returns the anchor of a heading, the same that repository hosts use.
pub(crate) fn slug(text: &str) -> String {
    let kept = text.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Resolves the destination of a link on a page.
pub(crate) fn resolve(page: &str, destination: &str, sources: &Sources) -> Target {
    if destination.contains("://") || destination.starts_with("mailto:") {
        return Target::External(destination.to_owned());
    }
    let (path, anchor) = destination.split_once('#').unwrap_or((destination, ""));
    let path = if path.is_empty() { page.to_owned() } else { join(page, path) };
    match sources.output(&path).or_else(|| sources.page(&path).map(|page| page.output.as_str())) {
        Some(output) => Target::Site { output: output.to_owned(), anchor: anchor.to_owned() },
        None => Target::Repository(path),
    }
}

/// Returns the path that is relative to the directory of a file.
fn join(file: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = file.split('/').collect();
    parts.pop();
    for part in relative.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

/// Returns the path from one file of the site to another.
pub(crate) fn relative(from: &str, to: &str) -> String {
    let from: Vec<&str> = from.split('/').collect();
    let to_parts: Vec<&str> = to.split('/').collect();
    let directories = &from[..from.len() - 1];
    let common = directories.iter().zip(&to_parts[..to_parts.len() - 1]).take_while(|(a, b)| a == b).count();
    format!("{}{}", "../".repeat(directories.len() - common), to_parts[common..].join("/"))
}

/// Escapes text for HTML, also in attributes.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
