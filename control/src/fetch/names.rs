//! Names of images: which URL a short name such as `debian:12` stands for.
//!
//! | name | URL |
//! |---|---|
//! | what `IMAGE_NAMES` says | as it says |
//! | anything with a `/` | itself |
//! | `cirros` | as `cirros:0.6.3` |
//! | `cirros:<version>` | `https://download.cirros-cloud.net/<version>/cirros-<version>-x86_64-disk.img` |
//! | `centos…`, `debian…`, `fedora…`, `rocky…`, `ubuntu…` | `<IMAGE_DOWNLOAD_URL>/<name>/latest.qcow2` |

use muster_types::settings::Settings;
use reqwest::Url;

/// Built-in names: a name, or the beginning of one before `*`, and a URL with `{site}`, `{name}` and `{version}`.
const NAMES: &[(&str, &str)] = &[
    ("cirros", "https://download.cirros-cloud.net/0.6.3/cirros-0.6.3-x86_64-disk.img"),
    ("cirros:*", "https://download.cirros-cloud.net/{version}/cirros-{version}-x86_64-disk.img"),
    ("centos*", "{site}/{name}/latest.qcow2"),
    ("debian*", "{site}/{name}/latest.qcow2"),
    ("fedora*", "{site}/{name}/latest.qcow2"),
    ("rocky*", "{site}/{name}/latest.qcow2"),
    ("ubuntu*", "{site}/{name}/latest.qcow2"),
];

/// The URL that a source stands for.
pub(crate) fn resolve(settings: &Settings, source: &str) -> Result<Url, &'static str> {
    let own = settings.image_names.split_whitespace().filter_map(|entry| entry.split_once('='));
    let own = own.filter(|(name, _)| matches(name, source)).map(|(_, url)| url).next();
    let template = match own {
        Some(template) => template,
        None if source.starts_with("sf://") || source.starts_with("label:") => {
            return Err("names something in this cluster, there is nothing to fetch");
        }
        None if source.contains('/') => source,
        None => NAMES
            .iter()
            .find(|(name, _)| matches(name, source))
            .map(|(_, url)| *url)
            .ok_or("is neither a URL nor the name of a known image")?,
    };
    let text = if template == source {
        source.to_owned()
    } else {
        let version = source.split_once(':').map_or("", |(_, version)| version);
        // A name becomes a part of a path, and nothing else.
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':');
        if !source.chars().all(plain) || source.contains("..") {
            return Err("is not the name of an image");
        }
        let site = settings.image_download_url.trim_end_matches('/');
        template.replace("{site}", site).replace("{name}", source).replace("{version}", version)
    };
    let url = Url::parse(&text).map_err(|_| "is not a valid URL")?;
    check_url(&url)?;
    Ok(url)
}

/// Refuses a URL that nothing should be fetched from.
pub(super) fn check_url(url: &Url) -> Result<(), &'static str> {
    if !matches!(url.scheme(), "http" | "https") {
        return Err("must begin with http:// or https://");
    }
    if url.host().is_none() {
        return Err("has no host");
    }
    // Whoever may see the artifact would see them.
    if !url.username().is_empty() || url.password().is_some() {
        return Err("must not contain a user name or a password");
    }
    Ok(())
}

fn matches(pattern: &str, name: &str) -> bool {
    pattern.strip_suffix('*').map_or_else(|| pattern == name, |beginning| name.starts_with(beginning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_for_urls_and_urls_for_themselves() {
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
    fn what_cannot_be_fetched_is_refused_with_the_field() {
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
