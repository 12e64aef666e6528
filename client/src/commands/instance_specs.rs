//! Parsers of disks, interfaces, video devices and the like. They check only the syntax; the server validates the values.

use std::fs;
use std::io::{self, Read as _};
use std::path::Path;

use anyhow::{anyhow, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use muster_types::ids::{ArtifactId, BlobId};
use muster_types::instance::SideChannel;
use muster_types::spec::{DiskBus, DiskSpec, DiskType, Vdi, VideoSpec};
use serde_json::{Map, Value, json};

use crate::api::{Client, Error, NewInterface, Result as ApiResult};
use crate::error_text::io_error_text;

/// The prefixes of SSH public keys.
const PUBLIC_KEY_PREFIXES: [&str; 4] = ["ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-"];

/// Parses `SIZE`, `@IMAGE` or `SIZE@IMAGE`, followed by `,bus=BUS` or `,type=cdrom`.
pub(super) fn parse_disk(text: &str) -> Result<DiskSpec, String> {
    let (mut bus, mut disk_type) = (DiskBus::Virtio, DiskType::Disk);
    let mut rest = text;
    // From the end, because the URL of an image may contain commas.
    while let Some((before, option)) = rest.rsplit_once(',') {
        match option.split_once('=') {
            Some(("bus", word)) => bus = parse_choice(word, DiskBus::ALL)?,
            Some(("type", word)) => disk_type = parse_choice(word, DiskType::ALL)?,
            Some((name, _)) if !before.contains("//") => {
                return Err(format!("{name:?} is not a disk option; the options are bus and type"));
            }
            None if option == DiskType::Cdrom.as_str() => disk_type = DiskType::Cdrom,
            Some(_) | None if before.contains("//") => break,
            Some(_) | None => {
                return Err(format!("{option:?} is not a disk option; options have the form NAME=VALUE"));
            }
        }
        rest = before;
    }
    let (size, base) = match rest.split_once('@') {
        Some((_, "")) => return Err("the image after @ is missing".into()),
        Some((size, base)) => (size, Some(base.to_owned())),
        None => (rest, None),
    };
    let size = match size {
        "" if base.is_some() => None,
        "" => return Err("must have a size in gigabytes, or @ and an image".into()),
        size => Some(parse_gigabytes(size)?),
    };
    Ok(DiskSpec { size, base, bus, disk_type })
}

/// Parses `NETWORK` or `NETWORK@ADDRESS`, followed by `,float`, `,model=MODEL` or `,mac=MAC`.
pub(super) fn parse_network(text: &str) -> Result<NewInterface, String> {
    let mut parts = text.split(',');
    let target = parts.next().unwrap_or_default();
    let (network, address) = match target.split_once('@') {
        Some((_, "")) => {
            return Err("the address after @ is missing; give `none` for an interface without address".into());
        }
        Some((network, address)) => (network, Some(address.to_owned())),
        None => (target, None),
    };
    if network.is_empty() {
        return Err("must start with the name or id of a network".into());
    }
    let mut interface = NewInterface {
        network_uuid: network.to_owned(),
        address,
        macaddress: None,
        model: None,
        float: false,
    };
    for option in parts {
        match option.split_once('=') {
            None if option == "float" => interface.float = true,
            Some(("mac", mac)) if !mac.is_empty() => interface.macaddress = Some(mac.to_owned()),
            Some(("model", model)) if !model.is_empty() => interface.model = Some(model.to_owned()),
            _ => {
                return Err(format!(
                    "{option:?} is not an interface option; the options are float, model=MODEL and mac=MAC"
                ));
            }
        }
    }
    Ok(interface)
}

/// Parses `model=MODEL`, `memory=KIB` and `vdi=VDI`, separated by commas.
pub(super) fn parse_video(text: &str) -> Result<VideoSpec, String> {
    let mut video = VideoSpec::default();
    for option in text.split(',') {
        match option.split_once('=') {
            Some(("model", model)) if !model.is_empty() => model.clone_into(&mut video.model),
            Some(("memory", memory)) => {
                video.memory =
                    memory.parse().map_err(|_| format!("memory {memory:?} must be a number of KiB"))?;
            }
            Some(("vdi", word)) => video.vdi = parse_choice(word, Vdi::ALL)?,
            _ => {
                return Err(format!(
                    "{option:?} is not a video option; the options are model=MODEL, memory=KIB and vdi=VDI"
                ));
            }
        }
    }
    Ok(video)
}

/// Parses a size in megabytes, or with a unit.
pub(super) fn parse_memory(text: &str) -> Result<u64, String> {
    let invalid = || "must be a number of megabytes, or one with a unit such as 512M or 2G".to_owned();
    let (number, unit) = split_unit(text).ok_or_else(invalid)?;
    let megabytes = match unit.as_str() {
        "" | "m" | "mb" | "mib" => 1,
        "g" | "gb" | "gib" => 1024,
        "t" | "tb" | "tib" => 1024 * 1024,
        _ => return Err(invalid()),
    };
    number.checked_mul(megabytes).ok_or_else(invalid)
}

/// Parses a size in gigabytes, or with a unit.
pub(super) fn parse_gigabytes(text: &str) -> Result<u64, String> {
    let invalid = || format!("size {text:?} must be a number of gigabytes, such as 20, or 2T");
    let (number, unit) = split_unit(text).ok_or_else(invalid)?;
    match unit.as_str() {
        "" | "g" | "gb" | "gib" => Ok(number),
        "t" | "tb" | "tib" => number.checked_mul(1024).ok_or_else(invalid),
        _ => Err(invalid()),
    }
}

fn split_unit(text: &str) -> Option<(u64, String)> {
    let (digits, unit) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    Some((digits.parse().ok()?, unit.to_ascii_lowercase()))
}

/// Parses one of the values that the API defines. The error lists them.
fn parse_choice<T: Copy + ToString>(word: &str, all: &[T]) -> Result<T, String> {
    all.iter().copied().find(|one| one.to_string() == word).ok_or_else(|| {
        let choices: Vec<String> = all.iter().map(ToString::to_string).collect();
        format!("{word:?} must be one of {}", choices.join(", "))
    })
}

/// Parses `KEY=VALUE`. A value that is not JSON is a string.
pub(super) fn parse_metadata(text: &str) -> Result<(String, Value), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => {
            Ok((key.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
        }
        _ => Err("must be KEY=VALUE".into()),
    }
}

/// Parses an affinity rule such as `require-with=TAG`. Returns the API's name of the rule, and the tag.
pub(super) fn parse_affinity(text: &str) -> Result<(&'static str, String), String> {
    let rules = [
        ("require-with", "require_with_tag"),
        ("require-without", "require_without_tag"),
        ("prefer-with", "prefer_with_tag"),
        ("prefer-without", "prefer_without_tag"),
    ];
    let (rule, tag) = text.split_once('=').filter(|(_, tag)| !tag.is_empty()).ok_or("must be RULE=TAG")?;
    let known = rules.into_iter().find(|(name, _)| *name == rule);
    known.map(|(_, rule)| (rule, tag.to_owned())).ok_or_else(|| {
        format!("{rule:?} is not an affinity rule; the rules are {}", rules.map(|(name, _)| name).join(", "))
    })
}

/// Builds the metadata of a new instance, including its tags and affinity.
pub(super) fn build_metadata(
    items: Vec<(String, Value)>,
    tags: &[String],
    affinity: Vec<(&'static str, String)>,
) -> anyhow::Result<Map<String, Value>> {
    let mut metadata: Map<String, Value> = items.into_iter().collect();
    let mut insert = |key: &str, value: Value| match metadata.insert(key.to_owned(), value) {
        Some(_) => Err(anyhow!("{key} is given both as an option and with --metadata")),
        None => Ok(()),
    };
    if !tags.is_empty() {
        insert("tags", json!(tags))?;
    }
    if !affinity.is_empty() {
        let mut rules = Map::new();
        for (rule, tag) in affinity {
            if let Some(tags) = rules.entry(rule).or_insert_with(|| json!([])).as_array_mut() {
                tags.push(tag.into());
            }
        }
        insert("affinity", rules.into())?;
    }
    Ok(metadata)
}

/// Checks the side channels: `None` if none is given, empty for `none`.
pub(super) fn check_side_channels(named: Vec<String>) -> anyhow::Result<Option<Vec<String>>> {
    if named.is_empty() {
        return Ok(None);
    }
    if named == ["none"] {
        return Ok(Some(vec![]));
    }
    for name in &named {
        parse_choice(name, SideChannel::ALL).map_err(|error| anyhow!("--side-channel: {error}, none"))?;
    }
    Ok(Some(named))
}

/// Returns the given public key, or the content of the given file.
pub(super) fn read_ssh_key(text: &str) -> anyhow::Result<String> {
    if PUBLIC_KEY_PREFIXES.iter().any(|prefix| text.starts_with(prefix)) {
        return Ok(text.trim().to_owned());
    }
    let key = fs::read_to_string(text)
        .map_err(|error| anyhow!("--ssh-key: cannot read {text:?}: {}", io_error_text(&error)))?;
    if key.contains("PRIVATE KEY") {
        bail!("--ssh-key: {text:?} is a private key, which must not be shared; did you mean {text}.pub?");
    }
    match key.trim() {
        "" => bail!("--ssh-key: {text:?} is empty"),
        key => Ok(key.to_owned()),
    }
}

/// Returns the content of a file, or of standard input for `-`, as base64.
pub(super) fn read_user_data(file: &Path) -> anyhow::Result<String> {
    let read = if file == Path::new("-") {
        let mut bytes = vec![];
        io::stdin().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        fs::read(file)
    };
    let bytes = read
        .map_err(|error| anyhow!("--user-data: cannot read {}: {}", file.display(), io_error_text(&error)))?;
    Ok(STANDARD.encode(bytes))
}

/// Resolves an image for the API. A plain word is an existing label, artifact or blob; anything else is passed to the
/// server unchanged.
pub(super) async fn resolve_image(client: &Client, word: &str) -> ApiResult<String> {
    if word.contains([':', '/']) || word.eq_ignore_ascii_case("none") {
        return Ok(word.to_owned());
    }
    if word.parse::<ArtifactId>().is_ok() {
        if let Some(artifact) = optional(client.artifact(word.into()).await)? {
            return Ok(format!("sf://artifact/{}", artifact.value()?.uuid));
        }
        // The server checks whether the blob exists.
        return Ok(word.parse::<BlobId>().map_or_else(|_| word.to_owned(), |id| format!("sf://blob/{id}")));
    }
    if optional(client.label(word).await)?.is_some() {
        return Ok(format!("label:{word}"));
    }
    match optional(client.artifact(word.into()).await)? {
        Some(artifact) => Ok(format!("sf://artifact/{}", artifact.value()?.uuid)),
        None => Ok(word.to_owned()),
    }
}

fn optional<T>(response: ApiResult<T>) -> ApiResult<Option<T>> {
    match response {
        Ok(response) => Ok(Some(response)),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
