//! How disks, interfaces, screens and the like are written on the command line. Only the form is looked at here: what
//! may be asked for is the server's to say.

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

use crate::api::{Client, Error, NewInterface, Result as ApiResult, io_text};

/// What the files of public keys begin with, in any of their kinds.
const KEY_KINDS: [&str; 4] = ["ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-"];

/// `SIZE`, `@IMAGE` or `SIZE@IMAGE`, then `,bus=BUS` and `,type=cdrom`.
pub(super) fn disk(text: &str) -> Result<DiskSpec, String> {
    let (mut bus, mut disk_type) = (DiskBus::Virtio, DiskType::Disk);
    let mut rest = text;
    // From the end: an image's address may hold commas, too.
    while let Some((before, option)) = rest.rsplit_once(',') {
        match option.split_once('=') {
            Some(("bus", word)) => bus = one_of(word, DiskBus::ALL)?,
            Some(("type", word)) => disk_type = one_of(word, DiskType::ALL)?,
            Some((name, _)) if !before.contains("//") => {
                return Err(format!("{name:?} is no option of a disk: there are bus and type"));
            }
            None if option == DiskType::Cdrom.as_str() => disk_type = DiskType::Cdrom,
            Some(_) | None if before.contains("//") => break,
            Some(_) | None => return Err(format!("{option:?} is no option of a disk: write NAME=VALUE")),
        }
        rest = before;
    }
    let (size, base) = match rest.split_once('@') {
        Some((_, "")) => return Err("no image after the @".into()),
        Some((size, base)) => (size, Some(base.to_owned())),
        None => (rest, None),
    };
    let size = match size {
        "" if base.is_some() => None,
        "" => return Err("must have a size in gigabytes, or @ and an image".into()),
        size => Some(gigabytes(size)?),
    };
    Ok(DiskSpec { size, base, bus, disk_type })
}

/// `NETWORK` or `NETWORK@ADDRESS`, then `,float`, `,model=MODEL` and `,mac=MAC`.
pub(super) fn network(text: &str) -> Result<NewInterface, String> {
    let mut parts = text.split(',');
    let place = parts.next().unwrap_or_default();
    let (network, address) = match place.split_once('@') {
        Some((_, "")) => return Err("no address after the @; `none` is none at all".into()),
        Some((network, address)) => (network, Some(address.to_owned())),
        None => (place, None),
    };
    if network.is_empty() {
        return Err("must begin with the name or id of a network".into());
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
                    "{option:?} is no option of an interface: there are float, model=MODEL and mac=MAC"
                ));
            }
        }
    }
    Ok(interface)
}

/// `model=MODEL`, `memory=KIB` and `vdi=VDI`, with commas between them.
pub(super) fn video(text: &str) -> Result<VideoSpec, String> {
    let mut video = VideoSpec::default();
    for option in text.split(',') {
        match option.split_once('=') {
            Some(("model", model)) if !model.is_empty() => model.clone_into(&mut video.model),
            Some(("memory", memory)) => {
                video.memory =
                    memory.parse().map_err(|_| format!("memory {memory:?} must be a number of KiB"))?;
            }
            Some(("vdi", word)) => video.vdi = one_of(word, Vdi::ALL)?,
            _ => {
                return Err(format!(
                    "{option:?} is no option of a screen: there are model=MODEL, memory=KIB and vdi=VDI"
                ));
            }
        }
    }
    Ok(video)
}

/// Megabytes, or with a unit.
pub(super) fn memory(text: &str) -> Result<u64, String> {
    let refused = || "must be a number of megabytes, or one with a unit such as 512M or 2G".to_owned();
    let (number, unit) = number_and_unit(text).ok_or_else(refused)?;
    let megabytes = match unit.as_str() {
        "" | "m" | "mb" | "mib" => 1,
        "g" | "gb" | "gib" => 1024,
        "t" | "tb" | "tib" => 1024 * 1024,
        _ => return Err(refused()),
    };
    number.checked_mul(megabytes).ok_or_else(refused)
}

/// A size in gigabytes, or in terabytes if it says so.
pub(super) fn gigabytes(text: &str) -> Result<u64, String> {
    let refused = || format!("size {text:?} must be a number of gigabytes, such as 20, or 2T");
    let (number, unit) = number_and_unit(text).ok_or_else(refused)?;
    match unit.as_str() {
        "" | "g" | "gb" | "gib" => Ok(number),
        "t" | "tb" | "tib" => number.checked_mul(1024).ok_or_else(refused),
        _ => Err(refused()),
    }
}

fn number_and_unit(text: &str) -> Option<(u64, String)> {
    let (digits, unit) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    Some((digits.parse().ok()?, unit.to_ascii_lowercase()))
}

/// A word of the API's, or what the words are.
fn one_of<T: Copy + ToString>(word: &str, all: &[T]) -> Result<T, String> {
    all.iter().copied().find(|one| one.to_string() == word).ok_or_else(|| {
        let words: Vec<String> = all.iter().map(ToString::to_string).collect();
        format!("{word:?} is none of {}", words.join(", "))
    })
}

/// `KEY=VALUE`, where the value is JSON or else a string.
pub(super) fn metadata(text: &str) -> Result<(String, Value), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => {
            Ok((key.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
        }
        _ => Err("must be KEY=VALUE".into()),
    }
}

/// `require-with=TAG` and its like: the API's name of the rule, and the tag.
pub(super) fn affinity(text: &str) -> Result<(&'static str, String), String> {
    let rules = [
        ("require-with", "require_with_tag"),
        ("require-without", "require_without_tag"),
        ("prefer-with", "prefer_with_tag"),
        ("prefer-without", "prefer_without_tag"),
    ];
    let (rule, tag) = text.split_once('=').filter(|(_, tag)| !tag.is_empty()).ok_or("must be RULE=TAG")?;
    let known = rules.into_iter().find(|(name, _)| *name == rule);
    known
        .map(|(_, rule)| (rule, tag.to_owned()))
        .ok_or_else(|| format!("{rule:?} is no rule: there are {}", rules.map(|(name, _)| name).join(", ")))
}

/// The metadata of a new instance. Tags and affinity are metadata, too.
pub(super) fn all_metadata(
    items: Vec<(String, Value)>,
    tags: &[String],
    affinity: Vec<(&'static str, String)>,
) -> anyhow::Result<Map<String, Value>> {
    let mut metadata: Map<String, Value> = items.into_iter().collect();
    let mut put = |key: &str, value: Value| match metadata.insert(key.to_owned(), value) {
        Some(_) => Err(anyhow!("{key} is given twice: as an option and by --metadata")),
        None => Ok(()),
    };
    if !tags.is_empty() {
        put("tags", json!(tags))?;
    }
    if !affinity.is_empty() {
        let mut rules = Map::new();
        for (rule, tag) in affinity {
            if let Some(tags) = rules.entry(rule).or_insert_with(|| json!([])).as_array_mut() {
                tags.push(tag.into());
            }
        }
        put("affinity", rules.into())?;
    }
    Ok(metadata)
}

/// The ways into a guest: nothing if none was named, none at all for `none`.
pub(super) fn side_channels(named: Vec<String>) -> anyhow::Result<Option<Vec<String>>> {
    if named.is_empty() {
        return Ok(None);
    }
    if named == ["none"] {
        return Ok(Some(vec![]));
    }
    for name in &named {
        one_of(name, SideChannel::ALL).map_err(|why| anyhow!("--side-channel: {why}, none"))?;
    }
    Ok(Some(named))
}

/// A public key: itself, or what is in the file of that name.
pub(super) fn ssh_key(text: &str) -> anyhow::Result<String> {
    if KEY_KINDS.iter().any(|kind| text.starts_with(kind)) {
        return Ok(text.trim().to_owned());
    }
    let key = fs::read_to_string(text)
        .map_err(|error| anyhow!("--ssh-key: cannot read {text:?}: {}", io_text(&error)))?;
    if key.contains("PRIVATE KEY") {
        bail!("--ssh-key: {text:?} is a private key, which nobody should be given; did you mean {text}.pub?");
    }
    match key.trim() {
        "" => bail!("--ssh-key: {text:?} is empty"),
        key => Ok(key.to_owned()),
    }
}

/// What is in a file, or for `-` in standard input, as base64.
pub(super) fn user_data(file: &Path) -> anyhow::Result<String> {
    let read = if file == Path::new("-") {
        let mut bytes = vec![];
        io::stdin().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        fs::read(file)
    };
    let bytes =
        read.map_err(|error| anyhow!("--user-data: cannot read {}: {}", file.display(), io_text(&error)))?;
    Ok(STANDARD.encode(bytes))
}

/// What an image goes by in the API. A plain word is a label, an artifact or a blob, if there is one; anything else the
/// server knows better.
pub(super) async fn image(client: &Client, word: &str) -> ApiResult<String> {
    if word.contains([':', '/']) || word.eq_ignore_ascii_case("none") {
        return Ok(word.to_owned());
    }
    if word.parse::<ArtifactId>().is_ok() {
        if let Some(artifact) = found(client.artifact(word.into()).await)? {
            return Ok(format!("sf://artifact/{}", artifact.value()?.uuid));
        }
        // Whether there is such a blob is seen when it is needed.
        return Ok(word.parse::<BlobId>().map_or_else(|_| word.to_owned(), |id| format!("sf://blob/{id}")));
    }
    if found(client.label(word).await)?.is_some() {
        return Ok(format!("label:{word}"));
    }
    match found(client.artifact(word.into()).await)? {
        Some(artifact) => Ok(format!("sf://artifact/{}", artifact.value()?.uuid)),
        None => Ok(word.to_owned()),
    }
}

fn found<T>(answer: ApiResult<T>) -> ApiResult<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(Error::Refused { status: 404, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;

    fn spec(size: Option<u64>, base: Option<&str>, bus: DiskBus, disk_type: DiskType) -> DiskSpec {
        DiskSpec { size, base: base.map(str::to_owned), bus, disk_type }
    }

    #[test]
    fn a_disk_has_a_size_or_an_image_or_both() {
        use DiskBus::{Nvme, Sata, Virtio};
        use DiskType::{Cdrom, Disk};
        for (text, expected) in [
            ("20", spec(Some(20), None, Virtio, Disk)),
            ("2T", spec(Some(2048), None, Virtio, Disk)),
            ("20GB", spec(Some(20), None, Virtio, Disk)),
            ("8@tiny", spec(Some(8), Some("tiny"), Virtio, Disk)),
            ("@debian:12", spec(None, Some("debian:12"), Virtio, Disk)),
            ("8@tiny,bus=nvme", spec(Some(8), Some("tiny"), Nvme, Disk)),
            ("@cd,type=cdrom,bus=sata", spec(None, Some("cd"), Sata, Cdrom)),
            ("@cd,cdrom", spec(None, Some("cd"), Virtio, Cdrom)),
            ("@https://h/a,b.img", spec(None, Some("https://h/a,b.img"), Virtio, Disk)),
            ("@https://h/a?x,y=1,bus=sata", spec(None, Some("https://h/a?x,y=1"), Sata, Disk)),
            ("9@https://me@h/a.img", spec(Some(9), Some("https://me@h/a.img"), Virtio, Disk)),
        ] {
            assert_eq!(disk(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_disk_is_refused() {
        for text in [
            "",
            "@",
            "8@",
            "x",
            "-8",
            "8M",
            "8,",
            "8,bus=ide",
            "8,bus",
            "8,size=9",
            "8@tiny,type=floppy",
            "8,9",
        ] {
            assert!(disk(text).is_err(), "{text}");
        }
        assert_eq!(disk("8,bus=ide").unwrap_err(), "\"ide\" is none of sata, scsi, usb, virtio, nvme");
    }

    #[test]
    fn an_interface_begins_with_its_network() {
        let plain = network("lan").unwrap();
        assert_eq!(json!(plain), json!({ "network_uuid": "lan", "float": false }));
        let full = network("lan@10.0.0.7,float,model=e1000,mac=02:00:00:00:00:07").unwrap();
        let expected = json!({
            "network_uuid": "lan", "address": "10.0.0.7", "float": true, "model": "e1000",
            "macaddress": "02:00:00:00:00:07"
        });
        assert_eq!(json!(full), expected);
        assert_eq!(network("lan@none").unwrap().address.as_deref(), Some("none"));
        for text in ["", "@10.0.0.7", "lan@", "lan,", "lan,floating", "lan,model=", "lan,mac", "lan,x=y"] {
            assert!(network(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_screen_has_defaults_for_what_is_not_said() {
        assert_eq!(video("vdi=vnc").unwrap(), VideoSpec { vdi: Vdi::Vnc, ..VideoSpec::default() });
        let full = VideoSpec { model: "qxl".into(), memory: 65536, vdi: Vdi::SpiceConcurrent };
        assert_eq!(video("model=qxl,memory=65536,vdi=spiceconcurrent").unwrap(), full);
        for text in ["", "qxl", "model=", "memory=1.5", "vdi=rdp", "colour=red"] {
            assert!(video(text).is_err(), "{text}");
        }
    }

    #[test]
    fn memory_is_in_megabytes_unless_it_says_otherwise() {
        for (text, megabytes) in [("512", 512), ("512M", 512), ("2G", 2048), ("2gib", 2048), ("1t", 1 << 20)]
        {
            assert_eq!(memory(text), Ok(megabytes), "{text}");
        }
        for text in ["", "G", "1.5G", "-1", "2X", "2 G", "99999999999999999999", "18446744073709551615T"] {
            assert!(memory(text).is_err(), "{text}");
        }
    }

    #[test]
    fn tags_and_affinity_become_metadata() {
        let items = vec![metadata("size=7").unwrap(), metadata("who=me=you").unwrap()];
        let rules =
            ["require-with=web", "prefer-without=db", "require-with=big"].map(|rule| affinity(rule).unwrap());
        let all = all_metadata(items, &["web".into()], rules.into()).unwrap();
        let expected = json!({
            "size": 7, "who": "me=you", "tags": ["web"],
            "affinity": { "require_with_tag": ["web", "big"], "prefer_without_tag": ["db"] }
        });
        assert_eq!(Value::from(all), expected);
        let twice = vec![metadata("tags=[\"a\"]").unwrap()];
        assert!(all_metadata(twice, &["b".into()], vec![]).is_err());
        assert!(metadata("size").is_err() && metadata("=7").is_err());
        assert!(
            affinity("near=web").is_err() && affinity("require-with=").is_err() && affinity("web").is_err()
        );
    }

    #[test]
    fn side_channels_are_the_servers_choice_none_or_those_named() {
        assert_eq!(side_channels(vec![]).unwrap(), None);
        assert_eq!(side_channels(vec!["none".into()]).unwrap(), Some(vec![]));
        assert_eq!(side_channels(vec!["sf-agent".into()]).unwrap(), Some(vec!["sf-agent".into()]));
        let refused = side_channels(vec!["agent".into()]).unwrap_err().to_string();
        assert_eq!(refused, "--side-channel: \"agent\" is none of sf-agent, sf-agent2, none");
    }

    #[test]
    fn a_key_is_given_by_itself_or_by_its_file_and_never_the_private_one() {
        assert_eq!(ssh_key("ssh-ed25519 AAAA me\n").unwrap(), "ssh-ed25519 AAAA me");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("id");
        let name = file.to_str().unwrap();
        assert!(ssh_key(name).unwrap_err().to_string().ends_with("no such file or directory"));
        fs::write(&file, "ecdsa-sha2-nistp256 AAAA me\n").unwrap();
        assert_eq!(ssh_key(name).unwrap(), "ecdsa-sha2-nistp256 AAAA me");
        fs::write(&file, "-----BEGIN OPENSSH PRIVATE KEY-----").unwrap();
        assert!(ssh_key(name).unwrap_err().to_string().ends_with("id.pub?"));
        fs::write(&file, "\n").unwrap();
        assert!(ssh_key(name).is_err());
    }

    #[test]
    fn user_data_is_sent_as_base64() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("data");
        fs::write(&file, [0, 255]).unwrap();
        assert_eq!(user_data(&file).unwrap(), "AP8=");
        assert!(user_data(&folder.path().join("none")).is_err());
    }

    #[tokio::test]
    async fn a_plain_word_is_a_label_or_an_artifact_or_left_to_the_server() {
        const ID: &str = "5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";
        const BLOB: &str = "1d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01";
        let artifact = json!({
            "uuid": ID, "name": "tiny", "namespace": "ci", "artifact_type": "image", "state": "created",
            "error_message": null, "source_url": "x", "shared": false, "max_versions": 3, "index": 1, "blobs": {},
            "metadata": {}, "version": 9, "last_cluster_operation": null, "references_to": {}, "references_from": {}
        });
        let (client, fake) = Fake::serve(vec![
            ("GET /label/stable", vec![(200, artifact.clone())]),
            ("GET /artifacts/tiny", vec![(200, artifact.clone())]),
            ("GET /artifacts/5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01", vec![(200, artifact)]),
            ("GET /artifacts/twice", vec![(400, json!({ "error": "multiple artifacts" }))]),
        ])
        .await;
        for as_it_is in ["debian:12", "label:x", "sf://blob/x", "https://h/a", "a/b", "none"] {
            assert_eq!(image(&client, as_it_is).await.unwrap(), as_it_is);
        }
        assert!(fake.asked().is_empty(), "{:?}", fake.asked());
        let artifact = format!("sf://artifact/{ID}");
        assert_eq!(image(&client, "stable").await.unwrap(), "label:stable");
        assert_eq!(image(&client, "tiny").await.unwrap(), artifact);
        assert_eq!(image(&client, ID).await.unwrap(), artifact);
        assert_eq!(image(&client, BLOB).await.unwrap(), format!("sf://blob/{BLOB}"));
        assert_eq!(image(&client, "cirros").await.unwrap(), "cirros");
        assert_eq!(image(&client, "twice").await.unwrap_err().to_string(), "multiple artifacts");
    }
}
