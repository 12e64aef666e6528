//! Resolves short names of images such as `debian:12` to URLs. See docs/decisions/0017.
//!
//! | name | URL |
//! |---|---|
//! | in `IMAGE_NAMES` | the URL given there |
//! | anything with a `/` | the name itself |
//! | `cirros` | that of `cirros:0.6.3` |
//! | `cirros:<version>` | `https://download.cirros-cloud.net/<version>/cirros-<version>-x86_64-disk.img` |
//! | `centos…`, `debian…`, `fedora…`, `rocky…`, `ubuntu…` | `<IMAGE_DOWNLOAD_URL>/<name>/latest.qcow2` |

use muster_types::settings::Settings;
use reqwest::Url;

/// The built-in names: a name or a prefix with `*`, and a URL template with `{site}`, `{name}` and `{version}`.
const BUILT_IN_NAMES: &[(&str, &str)] = &[
    ("cirros", "https://download.cirros-cloud.net/0.6.3/cirros-0.6.3-x86_64-disk.img"),
    ("cirros:*", "https://download.cirros-cloud.net/{version}/cirros-{version}-x86_64-disk.img"),
    ("centos*", "{site}/{name}/latest.qcow2"),
    ("debian*", "{site}/{name}/latest.qcow2"),
    ("fedora*", "{site}/{name}/latest.qcow2"),
    ("rocky*", "{site}/{name}/latest.qcow2"),
    ("ubuntu*", "{site}/{name}/latest.qcow2"),
];

/// Returns the URL of an image source.
pub(crate) fn resolve(settings: &Settings, source: &str) -> Result<Url, &'static str> {
    let configured = settings.image_names.split_whitespace().filter_map(|entry| entry.split_once('='));
    let configured = configured.filter(|(name, _)| matches(name, source)).map(|(_, url)| url).next();
    let template = match configured {
        Some(template) => template,
        None if source.starts_with("sf://") || source.starts_with("label:") => {
            return Err("names an object of this cluster, which cannot be fetched");
        }
        None if source.contains('/') => source,
        None => BUILT_IN_NAMES
            .iter()
            .find(|(name, _)| matches(name, source))
            .map(|(_, url)| *url)
            .ok_or("is neither a URL nor the name of a known image")?,
    };
    let text = if template == source {
        source.to_owned()
    } else {
        let version = source.split_once(':').map_or("", |(_, version)| version);
        // A name must not change the structure of the URL.
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':');
        if !source.chars().all(is_plain) || source.contains("..") {
            return Err("is not the name of an image");
        }
        let site = settings.image_download_url.trim_end_matches('/');
        template.replace("{site}", site).replace("{name}", source).replace("{version}", version)
    };
    let url = Url::parse(&text).map_err(|_| "is not a valid URL")?;
    check_url(&url)?;
    Ok(url)
}

/// Rejects URLs that must not be fetched.
pub(crate) fn check_url(url: &Url) -> Result<(), &'static str> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err("must begin with http:// or https://");
    }
    if url.host().is_none() {
        return Err("has no host");
    }
    // Everyone who can see the artifact could read them.
    if !url.username().is_empty() || url.password().is_some() {
        return Err("must not contain a user name or a password");
    }
    Ok(())
}

fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or_else(|| pattern == name, |prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolves_names_and_keeps_urls() {
        let own = "mine=http://img.example/mine.qcow2 debian:13=https://img.example/{name}?v={version}";
        let settings = Settings::from_pairs(&[("IMAGE_NAMES", own)]).unwrap();
        for (source, url) in [
            ("https://a.example/x.img", "https://a.example/x.img"),
            ("cirros", "https://download.cirros-cloud.net/0.6.3/cirros-0.6.3-x86_64-disk.img"),
            ("cirros:0.5.2", "https://download.cirros-cloud.net/0.5.2/cirros-0.5.2-x86_64-disk.img"),
            ("debian:12", "https://images.shakenfist.com/debian:12/latest.qcow2"),
            ("ubuntu", "https://images.shakenfist.com/ubuntu/latest.qcow2"),
            ("mine", "http://img.example/mine.qcow2"),
            ("debian:13", "https://img.example/debian:13?v=13"),
        ] {
            assert_eq!(resolve(&settings, source).unwrap().as_str(), url);
        }
    }

    #[test]
    fn rejects_sources_that_cannot_be_fetched() {
        let settings = Settings::defaults();
        for source in [
            "windows",
            "debian..",
            "debian\u{e9}",
            "ftp://a.example/x",
            "file:///etc/passwd",
            "http://",
            "http://me:pw@a.example/x",
            "sf://blob/x",
            "label:x",
            "/etc/passwd",
            "",
        ] {
            assert!(resolve(&settings, source).is_err(), "{source}");
        }
    }
}
