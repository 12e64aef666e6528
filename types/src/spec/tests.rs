//! Error texts of specs, and properties for arbitrary JSON.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;
use crate::spec::ValidationMode::{self, Enforce, Off, Warn};
use crate::{Error, Result};

const MODES: [ValidationMode; 3] = [Enforce, Warn, Off];

fn read_disks(value: &Value, mode: ValidationMode) -> Result<Vec<DiskSpec>> {
    parse_disks(Some(value), DiskBus::Virtio, &mut ValidationFindings::new(mode))
}

fn read_networks(value: &Value, mode: ValidationMode) -> Result<Vec<NetworkSpec>> {
    parse_networks(Some(value), &mut ValidationFindings::new(mode))
}

fn read_video(value: &Value, mode: ValidationMode) -> Result<VideoSpec> {
    parse_video(Some(value), None, &mut ValidationFindings::new(mode))
}

fn error_text<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Invalid(text)) => text,
        other => panic!("not rejected as invalid: {other:?}"),
    }
}

fn disk(size: Option<u64>, base: Option<&str>) -> DiskSpec {
    DiskSpec { size, base: base.map(str::to_owned), bus: DiskBus::Virtio, disk_type: DiskType::Disk }
}

fn disk_on(bus: DiskBus, disk_type: DiskType) -> DiskSpec {
    DiskSpec { bus, disk_type, ..disk(Some(1), None) }
}

#[test]
fn rejects_invalid_disks_in_every_mode() {
    for (value, text) in [
        (json!(null), "instance must specify at least one disk"),
        (json!([]), "instance must specify at least one disk"),
        (json!({}), "disk: Not a valid list."),
        (json!("8"), "disk: Not a valid list."),
        (json!(["8@cirros"]), "disk specification should contain JSON objects"),
        (json!([{"size": "x"}, null]), "disk specification should contain JSON objects"),
        (json!([{"size": 8}, {"size": "big"}]), "disk[1].size: Not a valid integer."),
        (json!([{"size": 8.5}]), "disk[0].size: Not a valid integer."),
        (json!([{"size": "8.0"}]), "disk[0].size: Not a valid integer."),
        (json!([{"size": ""}]), "disk[0].size: Not a valid integer."),
        (json!([{"size": true}]), "disk[0].size: Not a valid integer."),
        (json!([{"size": [8]}]), "disk[0].size: Not a valid integer."),
        (json!([{"size": -1}]), "disk[0].size: Must be greater than or equal to 0."),
        (json!([{"size": "-1"}]), "disk[0].size: Must be greater than or equal to 0."),
        (json!([{"size": -1, "base": "cirros"}]), "disk[0].size: Must be greater than or equal to 0."),
        (
            json!([{"size": 1_000_001}]),
            "disk[0].size: Must be greater than or equal to 0 and less than or equal to 1000000.",
        ),
        (
            json!([{"size": 1e300}]),
            "disk[0].size: Must be greater than or equal to 0 and less than or equal to 1000000.",
        ),
        (json!([{"base": 7}]), "disk[0].base: Not a valid string."),
        (json!([{"size": 8, "bus": "ide"}]), "disk[0].bus: Must be one of: sata, scsi, usb, virtio, nvme."),
        (json!([{"size": 8, "bus": "SATA"}]), "disk[0].bus: Must be one of: sata, scsi, usb, virtio, nvme."),
        (json!([{"size": 8, "bus": 1}]), "disk[0].bus: Not a valid string."),
        (json!([{"size": 8, "type": "floppy"}]), "disk[0].type: Must be one of: disk, cdrom."),
        (json!([{"size": 8, "type": false}]), "disk[0].type: Not a valid string."),
        (json!([{}]), "disk[0]: a disk needs a size or a base"),
        (json!([{"size": 0}]), "disk[0]: a disk needs a size or a base"),
        (json!([{"size": null, "base": null}]), "disk[0]: a disk needs a size or a base"),
        (json!([{"size": 8}, {"size": 0, "base": ""}]), "disk[1]: a disk needs a size or a base"),
        (json!([{"base": "none"}]), "disk[0]: a disk needs a size or a base"),
        (json!([{"base": "None"}]), "disk[0]: a disk needs a size or a base"),
    ] {
        for mode in MODES {
            assert_eq!(error_text(read_disks(&value, mode)), text, "{value} {mode:?}");
        }
    }
    assert_eq!(
        error_text(parse_disks(None, DiskBus::Virtio, &mut ValidationFindings::new(Enforce))),
        "instance must specify at least one disk"
    );
}

#[test]
fn accepts_disks_in_the_notations_of_released_clients() {
    for (value, expected) in [
        (json!({"size": 8}), disk(Some(8), None)),
        (json!({"size": "8"}), disk(Some(8), None)),
        (json!({"size": " 8 "}), disk(Some(8), None)),
        (json!({"size": 8.0}), disk(Some(8), None)),
        (json!({"size": 1_000_000}), disk(Some(1_000_000), None)),
        (json!({"size": 8, "base": "NONE", "bus": null, "type": null}), disk(Some(8), None)),
        (json!({"size": 8, "base": "cirros", "bus": "", "type": ""}), disk(Some(8), Some("cirros"))),
        (json!({"size": 0, "base": "cirros"}), disk(None, Some("cirros"))),
        (json!({"size": null, "base": "sf://blob/x"}), disk(None, Some("sf://blob/x"))),
        (
            json!({"base": "debian:12", "bus": "nvme", "type": "cdrom"}),
            DiskSpec { bus: DiskBus::Nvme, disk_type: DiskType::Cdrom, ..disk(None, Some("debian:12")) },
        ),
    ] {
        assert_eq!(read_disks(&json!([value]), Enforce).unwrap(), [expected], "{value}");
    }
    let unset =
        parse_disks(Some(&json!([{"size": 1}])), DiskBus::Scsi, &mut ValidationFindings::new(Enforce))
            .unwrap();
    assert_eq!(unset[0].bus, DiskBus::Scsi);
}

#[test]
fn rejects_invalid_networks_in_every_mode() {
    for (value, text) in [
        (json!({"network_uuid": "n"}), "network: Not a valid list."),
        (json!("n"), "network: Not a valid list."),
        (json!(["n"]), "network specification should contain JSON objects"),
        (json!([null]), "network specification should contain JSON objects"),
        (json!([{}]), "network specification is missing network_uuid"),
        (json!([{"network_uuid": null}]), "network specification is missing network_uuid"),
        (json!([{"network_uuid": ""}]), "network specification is missing network_uuid"),
        (json!([{"network_uuid": 7}]), "network[0].network_uuid: Not a valid string."),
        (
            json!([{"network_uuid": "n"}, {"network_uuid": "n", "macaddress": "02-00-00-00-00-01"}]),
            "network[1].macaddress: String does not match expected pattern.",
        ),
        (
            json!([{"network_uuid": "n", "macaddress": "02:00:00:00:00:01\n"}]),
            "network[0].macaddress: String does not match expected pattern.",
        ),
        (json!([{"network_uuid": "n", "macaddress": 2}]), "network[0].macaddress: Not a valid string."),
        (json!([{"network_uuid": "n", "address": 10}]), "network[0].address: Not a valid string."),
        (
            json!([{"network_uuid": "n", "model": "e1000,id=x"}]),
            "network[0].model: String does not match expected pattern.",
        ),
        (
            json!([{"network_uuid": "n", "model": "x".repeat(33)}]),
            "network[0].model: String does not match expected pattern.",
        ),
        (
            json!([{"network_uuid": "n", "model": "virtio\n"}]),
            "network[0].model: String does not match expected pattern.",
        ),
        (json!([{"network_uuid": "n", "model": {}}]), "network[0].model: Not a valid string."),
        (json!([{"network_uuid": "n", "float": 2}]), "network[0].float: Not a valid boolean."),
        (json!([{"network_uuid": "n", "float": []}]), "network[0].float: Not a valid boolean."),
    ] {
        for mode in MODES {
            assert_eq!(error_text(read_networks(&value, mode)), text, "{value} {mode:?}");
        }
    }
}

#[test]
fn errors_of_a_hot_plugged_network_name_its_path() {
    let read = |value| parse_network(&value, "network", &mut ValidationFindings::new(Enforce));
    assert_eq!(error_text(read(json!([]))), "network specification should contain JSON objects");
    assert_eq!(
        error_text(read(json!({"network_uuid": "n", "model": "?"}))),
        "network.model: String does not match expected pattern."
    );
    assert_eq!(error_text(read(json!({"network_uuid": "n", "order": 1}))), "network.order: Unknown field.");
}

#[test]
fn accepts_networks_in_the_notations_of_released_clients() {
    let plain = NetworkSpec {
        network: "n".into(),
        mac: None,
        address: AddressSpec::Any,
        model: "virtio".into(),
        float: false,
    };
    assert_eq!(read_networks(&json!(null), Enforce).unwrap(), []);
    assert_eq!(read_networks(&json!([]), Enforce).unwrap(), []);
    assert_eq!(parse_networks(None, &mut ValidationFindings::new(Enforce)).unwrap(), []);
    for (value, expected) in [
        (json!({}), plain.clone()),
        (json!({"macaddress": null, "address": null, "model": null, "float": null}), plain.clone()),
        (
            json!({"macaddress": "", "address": "", "model": ""}),
            NetworkSpec { address: AddressSpec::None, ..plain.clone() },
        ),
        (json!({"address": "None"}), NetworkSpec { address: AddressSpec::None, ..plain.clone() }),
        (
            json!({"address": "10.0.0.x"}),
            NetworkSpec { address: AddressSpec::Fixed("10.0.0.x".into()), ..plain.clone() },
        ),
        (
            json!({"macaddress": "02:00:00:AB:cd:0f", "model": "no-such_model.7", "float": true}),
            NetworkSpec {
                mac: Some("02:00:00:ab:cd:0f".parse().unwrap()),
                model: "no-such_model.7".into(),
                float: true,
                ..plain.clone()
            },
        ),
    ] {
        let mut value = value;
        value["network_uuid"] = json!("n");
        assert_eq!(read_networks(&json!([value]), Enforce).unwrap(), [expected], "{value}");
    }
}

#[test]
fn accepts_booleans_in_the_notations_of_released_clients() {
    let read = |float: Value, mode| {
        read_networks(&json!([{"network_uuid": "n", "float": float}]), mode).map(|specs| specs[0].float)
    };
    let yes = "t T true True TRUE on On ON y Y yes Yes YES 1";
    let no = "f F false False FALSE off Off OFF n N no No NO 0";
    for (spellings, meaning) in [(yes, true), (no, false)] {
        for spelling in spellings.split(' ') {
            assert_eq!(read(json!(spelling), Enforce).unwrap(), meaning, "{spelling}");
        }
    }
    for (value, meaning) in [(json!(1), true), (json!(0), false), (json!(1.0), true), (json!(false), false)] {
        assert_eq!(read(value, Enforce).unwrap(), meaning);
    }
    for other in ["", "maybe", "tRUE", " yes", "2"] {
        let text = "network[0].float: Not a valid boolean.";
        assert_eq!(error_text(read(json!(other), Enforce)), text, "{other:?}");
        assert!(read(json!(other), Warn).unwrap() && read(json!(other), Off).unwrap());
    }
}

#[test]
fn rejects_invalid_displays_in_every_mode() {
    let vdi = "video.vdi: Must be one of: vnc, spice, spiceconcurrent, spicedebug.";
    for (value, text) in [
        (json!([]), "video: Not a valid mapping type."),
        (json!("qxl"), "video: Not a valid mapping type."),
        (json!({"vdi": "vnc"}), "video specification requires \"model\""),
        (json!({"memory": 1, "model": null}), "video specification requires \"model\""),
        (json!({"model": "vga"}), "video specification requires \"memory\""),
        (json!({"model": "vga", "memory": null}), "video specification requires \"memory\""),
        (json!({"model": 1, "memory": 1}), "video.model: Not a valid string."),
        (json!({"model": "", "memory": 1}), "video.model: String does not match expected pattern."),
        (json!({"model": "vga,x=1", "memory": 1}), "video.model: String does not match expected pattern."),
        (json!({"model": "vga", "memory": 1.5}), "video.memory: Not a valid integer."),
        (json!({"model": "vga", "memory": "1.5"}), "video.memory: Not a valid integer."),
        (json!({"model": "vga", "memory": {}}), "video.memory: Not a valid integer."),
        (json!({"model": "vga", "memory": -1}), "video.memory: Must be greater than or equal to 0."),
        (
            json!({"model": "vga", "memory": 4_194_305}),
            "video.memory: Must be greater than or equal to 0 and less than or equal to 4194304.",
        ),
        (json!({"model": "vga", "memory": 1, "vdi": "rdp"}), vdi),
        (json!({"model": "vga", "memory": 1, "vdi": ""}), vdi),
        (json!({"model": "vga", "memory": 1, "vdi": 1}), "video.vdi: Not a valid string."),
    ] {
        for mode in MODES {
            assert_eq!(error_text(read_video(&value, mode)), text, "{value} {mode:?}");
        }
    }
}

#[test]
fn accepts_video_and_videospec() {
    let read = |a: Value, b: Value| parse_video(Some(&a), Some(&b), &mut ValidationFindings::new(Enforce));
    let qxl = json!({"model": "qxl", "memory": "65536", "vdi": "vnc"});
    let spec = VideoSpec { model: "qxl".into(), memory: 65536, vdi: Vdi::Vnc };
    for nothing in [json!(null), json!({})] {
        assert_eq!(read(nothing.clone(), nothing.clone()).unwrap(), VideoSpec::default());
        assert_eq!(read(qxl.clone(), nothing.clone()).unwrap(), spec);
        assert_eq!(read(nothing, qxl.clone()).unwrap(), spec);
    }
    assert_eq!(parse_video(None, None, &mut ValidationFindings::new(Enforce)).unwrap(), VideoSpec::default());
    assert_eq!(read(qxl.clone(), qxl.clone()).unwrap(), spec);
    let null_vdi = json!({"model": "vga", "memory": 16384, "vdi": null});
    assert_eq!(read(null_vdi.clone(), json!(null)).unwrap().vdi, Vdi::Spice);
    assert_eq!(error_text(read(qxl, null_vdi)), "videospec: differs from video, send only one of them");
    assert_eq!(
        error_text(read(json!(null), json!({"model": "vga", "memory": "x"}))),
        "videospec.memory: Not a valid integer."
    );
}

#[test]
fn rejects_collects_or_ignores_unknown_keys() {
    type Read = fn(&mut ValidationFindings) -> Result<()>;
    let cases: [(Read, &str); 3] = [
        (
            |found| {
                parse_disks(Some(&json!([{"size": 1}, {"size": 1, "sizes": 2}])), DiskBus::Virtio, found)
                    .map(drop)
            },
            "disk[1].sizes: Unknown field.",
        ),
        (
            |found| parse_networks(Some(&json!([{"network_uuid": "n", "mac": "x"}])), found).map(drop),
            "network[0].mac: Unknown field.",
        ),
        (
            |found| {
                parse_video(Some(&json!({"model": "vga", "memory": 1, "heads": 2})), None, found).map(drop)
            },
            "video.heads: Unknown field.",
        ),
    ];
    for (read, text) in cases {
        assert_eq!(error_text(read(&mut ValidationFindings::new(Enforce))), text);
        for (mode, expected) in [(Warn, vec![text.to_owned()]), (Off, vec![])] {
            let mut found = ValidationFindings::new(mode);
            read(&mut found).unwrap();
            assert_eq!(found.texts(), expected);
        }
    }
}

#[test]
fn limits_length_and_number_of_findings() {
    let long = "k".repeat(1000);
    let text = error_text(read_disks(&json!([{"size": 1, long: 1}]), Enforce));
    assert_eq!(text, format!("disk[0].{}: Unknown field.", "k".repeat(64)));
    let mut spec = Map::from_iter((0..100).map(|at| (format!("key{at}"), json!(1))));
    spec.insert("size".into(), json!(1));
    let mut found = ValidationFindings::new(Warn);
    parse_disks(Some(&json!([spec])), DiskBus::Virtio, &mut found).unwrap();
    assert_eq!(found.texts().len(), 20);
}

#[test]
fn rejects_names_that_are_not_host_names() {
    let longest = "x".repeat(63);
    for good in ["a", "A-1", "web-01", "7", longest.as_str(), "xn--bcher-kva"] {
        assert!(check_instance_name(good).is_ok(), "{good}");
    }
    let long = "x".repeat(64);
    let huge = "x".repeat(10_000);
    for bad in [
        "",
        "-a",
        "a-",
        "a.b",
        "10.0.0.1",
        "::1",
        "a_b",
        "a b",
        "bücher",
        "a\n",
        &long,
        &huge,
        "7f1b7f9e-8d4e-4a5e-9a55-0c5d1d7f1c11",
        "7f1b7f9e8d4e4a5e9a550c5d1d7f1c11",
    ] {
        let text = error_text(check_instance_name(bad));
        let shown: String = bad.chars().take(64).collect();
        let start = format!("instance name {shown} is not useable as a DNS and Linux host name. It ");
        assert!(text.starts_with(&start) && text.len() < 300, "{text}");
    }
}

#[test]
fn parses_string_elements_of_tags() {
    assert_eq!(parse_tags(&json!(["a", 1, "b", null])).unwrap(), ["a", "b"]);
    for bad in [json!("a"), json!({"a": 1}), json!(null)] {
        assert_eq!(error_text(parse_tags(&bad)), "value for \"tags\" key should be a JSON list");
    }
}

#[test]
fn parses_both_forms_of_affinity() {
    let all = json!({
        "require_with_tag": ["a"],
        "require_without_tag": ["b", "c"],
        "prefer_with_tag": ["d"],
        "prefer_without_tag": [],
    });
    let (read, weighted) = parse_affinity(&all).unwrap();
    assert_eq!((read.require_with, read.require_without), (vec!["a".into()], vec!["b".into(), "c".into()]));
    assert_eq!((read.prefer_with, read.prefer_without, weighted), (vec!["d".into()], vec![], false));

    let (read, weighted) = parse_affinity(&json!({"a": 5, "b": "-2", "c": 0, "d": " 1 "})).unwrap();
    assert!(weighted && !read.has_requirements());
    assert_eq!((read.prefer_with, read.prefer_without), (vec!["a".into(), "d".into()], vec!["b".into()]));
    assert_eq!(parse_affinity(&json!({})).unwrap(), (Affinity::default(), false));
}

#[test]
fn rejects_invalid_affinity() {
    for (value, text) in [
        (json!([]), "value for \"affinity\" key should be a valid JSON dictionary"),
        (json!("a"), "value for \"affinity\" key should be a valid JSON dictionary"),
        (json!({"a": true}), "affinity dictionary values should be integers, not booleans"),
        (json!({"a": "much"}), "affinity dictionary values should be integers"),
        (json!({"a": 1.5}), "affinity dictionary values should be integers"),
        (json!({"a": null}), "affinity dictionary values should be integers"),
        (
            json!({"require_with_tag": "a"}),
            "value for affinity constraint \"require_with_tag\" should be a JSON list of tags",
        ),
        (
            json!({"prefer_with_tag": null}),
            "value for affinity constraint \"prefer_with_tag\" should be a JSON list of tags",
        ),
        (
            json!({"require_without_tag": ["a", ""]}),
            "affinity constraint \"require_without_tag\" should contain only non-empty tag names",
        ),
        (
            json!({"prefer_without_tag": [1]}),
            "affinity constraint \"prefer_without_tag\" should contain only non-empty tag names",
        ),
        (
            json!({"require_with_tag": ["a"], "y": 1, "x": 1}),
            "affinity keys ['x', 'y'] are not valid alongside the binary affinity constraints; the weighted and \
             binary forms cannot be mixed",
        ),
    ] {
        assert_eq!(error_text(parse_affinity(&value)), text, "{value}");
    }
}

#[test]
fn assigns_device_names() {
    use DiskBus::{Nvme, Sata, Scsi, Usb, Virtio};
    use DiskType::{Cdrom, Disk};
    let names = |disks: &[(DiskBus, DiskType)], config_drive| {
        let disks: Vec<DiskSpec> = disks.iter().map(|(bus, kind)| disk_on(*bus, *kind)).collect();
        let devices = layout_disks(&disks, config_drive);
        devices.into_iter().map(|device| format!("{} {}", device.device, device.bus)).collect::<Vec<_>>()
    };
    assert_eq!(names(&[(Virtio, Disk)], true), ["vda virtio", "vdb virtio"]);
    assert_eq!(names(&[(Virtio, Disk), (Virtio, Disk)], true), ["vda virtio", "vdb virtio", "vdc virtio"]);
    assert_eq!(names(&[(Virtio, Disk), (Virtio, Disk)], false), ["vda virtio", "vdb virtio"]);
    assert_eq!(
        names(&[(Sata, Disk), (Scsi, Disk), (Usb, Disk)], true),
        ["sda sata", "sdb sata", "sdc scsi", "sdd usb"]
    );
    assert_eq!(names(&[(Nvme, Disk), (Virtio, Disk)], true), ["nvme0 nvme", "nvme1 nvme", "vdc virtio"]);
    assert_eq!(names(&[(Virtio, Disk), (Virtio, Cdrom)], true), ["vda virtio", "vdb virtio", "sdc usb"]);
    assert_eq!(names(&[(Virtio, Cdrom), (Virtio, Disk)], true), ["sda usb", "sdb usb", "vdc virtio"]);
    assert_eq!(names(&[(Sata, Cdrom)], false), ["sda sata"]);

    let devices = layout_disks(&vec![disk_on(Virtio, Disk); 28 + 26 * 26], true);
    let name = |at: usize| devices[at].device.as_str();
    assert_eq!((name(25), name(26), name(27), name(51), name(52)), ("vdz", "vdaa", "vdab", "vdaz", "vdba"));
    assert_eq!((name(701), name(702)), ("vdzz", "vdaaa"));
    assert_eq!(devices[1].role, DiskRole::ConfigDrive);
    assert_eq!((devices[0].role, devices[2].role), (DiskRole::Disk(0), DiskRole::Disk(1)));
}

/// Returns the JSON with which a client would request the same.
fn as_json(spec: &NetworkSpec) -> Value {
    json!({
        "network_uuid": spec.network,
        "macaddress": spec.mac.map(|mac| mac.to_string()),
        "address": match &spec.address {
            AddressSpec::Any => None,
            AddressSpec::None => Some("none"),
            AddressSpec::Fixed(address) => Some(address.as_str()),
        },
        "model": spec.model,
        "float": spec.float,
    })
}

/// Generates valid and invalid JSON of the kinds that clients send.
fn any_json() -> impl Strategy<Value = Value> {
    let words = prop::sample::select(vec![
        "",
        "none",
        "virtio",
        "sata",
        "cdrom",
        "disk",
        "vnc",
        "true",
        "off",
        "8",
        "-3",
        "02:00:00:00:00:01",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0_i64..100).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        words.prop_map(Value::from),
        ".*".prop_map(Value::from),
    ];
    let keys = prop_oneof![
        8 => prop::sample::select(vec![
            "size", "base", "bus", "type", "network_uuid", "macaddress", "address", "model", "float", "memory", "vdi",
            "require_with_tag", "prefer_without_tag",
        ])
        .prop_map(str::to_owned),
        1 => ".*",
    ];
    leaf.prop_recursive(3, 48, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(keys.clone(), inner, 0..6)
                .prop_map(|values| Value::Object(values.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn accepted_specs_are_accepted_again_and_nothing_panics(value in any_json(), at in 0..3_usize) {
        let mode = MODES[at];
        for value in [value.clone(), json!([value])] {
            if let Ok(specs) = read_disks(&value, mode) {
                prop_assert!(specs.iter().all(|spec| spec.size.is_some() || spec.base.is_some()));
                prop_assert_eq!(read_disks(&json!(&specs), Enforce).unwrap(), specs);
            }
            if let Ok(specs) = read_networks(&value, mode) {
                let again: Vec<Value> = specs.iter().map(as_json).collect();
                prop_assert_eq!(read_networks(&json!(again), Enforce).unwrap(), specs);
            }
            if let Ok(spec) = read_video(&value, mode) {
                prop_assert_eq!(read_video(&json!(&spec), Enforce).unwrap(), spec);
            }
            let _ = (parse_tags(&value), parse_affinity(&value));
        }
    }

    #[test]
    fn accepts_well_formed_specs(
        size in prop::option::of(1..=MAX_DISK_GB),
        base in prop::option::of("[a-z]{5,9}:[0-9]{1,3}"),
        bus in prop::sample::select(DiskBus::ALL),
        disk_type in prop::sample::select(DiskType::ALL),
        model in "[A-Za-z0-9._-]{1,32}",
        mac in prop::option::of(any::<[u8; 5]>().prop_map(|[a, b, c, d, e]| crate::address::MacAddress([2, a, b, c, d, e]))),
        address in prop_oneof![
            Just(AddressSpec::Any),
            Just(AddressSpec::None),
            "[0-9]{1,3}\\.[0-9]{1,3}".prop_map(AddressSpec::Fixed),
        ],
        float in any::<bool>(),
    ) {
        let spec = DiskSpec { size, base, bus, disk_type };
        let read = read_disks(&json!([&spec]), Enforce);
        match (spec.size, &spec.base) {
            (None, None) => prop_assert!(read.is_err()),
            _ => prop_assert_eq!(read.unwrap(), [spec]),
        }
        let spec = NetworkSpec { network: "n".into(), mac, address, model, float };
        prop_assert_eq!(read_networks(&json!([as_json(&spec)]), Enforce).unwrap(), [spec]);
    }

    #[test]
    fn device_names_are_unique(
        disks in prop::collection::vec(
            (prop::sample::select(DiskBus::ALL), prop::sample::select(DiskType::ALL)), 1..60,
        ),
        config_drive in any::<bool>(),
    ) {
        let disks: Vec<DiskSpec> = disks.into_iter().map(|(bus, kind)| disk_on(bus, kind)).collect();
        let devices = layout_disks(&disks, config_drive);
        prop_assert_eq!(devices.len(), disks.len() + usize::from(config_drive));
        let names: std::collections::BTreeSet<_> = devices.iter().map(|device| &device.device).collect();
        prop_assert_eq!(names.len(), devices.len());
    }
}
