//! The requested disks of an instance, and their device names in the guest.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::fields::{Fields, ValidationFindings};
use crate::object::string_enum;
use crate::{Error, Result};

/// The maximum size of a disk, far below where the number of bytes would overflow.
pub const MAX_DISK_GB: u64 = 1_000_000;

string_enum! {
    /// The bus of a disk.
    DiskBus {
        Sata = "sata",
        Scsi = "scsi",
        Usb = "usb",
        Virtio = "virtio",
        Nvme = "nvme",
    }
}

string_enum! {
    /// The type of a disk.
    DiskType {
        Disk = "disk",
        Cdrom = "cdrom",
    }
}

/// A requested disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskSpec {
    /// In gigabytes; `null` for the size of the base.
    pub size: Option<u64>,
    /// The image that is the initial content; `null` for an empty disk.
    pub base: Option<String>,
    /// The bus that the disk is attached to.
    pub bus: DiskBus,
    /// Whether it is a disk or a CD-ROM.
    #[serde(rename = "type")]
    pub disk_type: DiskType,
}

/// Parses the `disk` list of an instance.
pub fn parse_disks(
    value: Option<&Value>,
    default_bus: DiskBus,
    findings: &mut ValidationFindings,
) -> Result<Vec<DiskSpec>> {
    let reject = |text: &str| Err(Error::Invalid(text.into()));
    let elements = match value {
        None | Some(Value::Null) => &Vec::new(),
        Some(Value::Array(elements)) => elements,
        Some(_) => return reject("disk: Not a valid list."),
    };
    if elements.is_empty() {
        return reject("instance must specify at least one disk");
    }
    if !elements.iter().all(Value::is_object) {
        return reject("disk specification should contain JSON objects");
    }
    let parse = |(at, element)| parse_disk(element, &format!("disk[{at}]"), default_bus, findings);
    elements.iter().enumerate().map(parse).collect()
}

fn parse_disk(
    value: &Value,
    path: &str,
    default_bus: DiskBus,
    findings: &mut ValidationFindings,
) -> Result<DiskSpec> {
    let Value::Object(values) = value else {
        return Err(Error::Invalid("disk specification should contain JSON objects".into()));
    };
    let fields = Fields::new(path, values, &["size", "base", "bus", "type"], findings)?;
    // Released clients that cannot omit the size send 0.
    let size = fields.count("size", MAX_DISK_GB)?.filter(|size| *size > 0);
    let base = fields.filled_text("base")?.filter(|base| !base.eq_ignore_ascii_case("none"));
    let bus = fields.string_enum("bus", fields.filled_text("bus")?, DiskBus::ALL, DiskBus::as_str)?;
    let disk_type =
        fields.string_enum("type", fields.filled_text("type")?, DiskType::ALL, DiskType::as_str)?;
    if size.is_none() && base.is_none() {
        return Err(Error::Invalid(format!("{path}: a disk needs a size or a base")));
    }
    Ok(DiskSpec {
        size,
        base: base.map(str::to_owned),
        bus: bus.unwrap_or(default_bus),
        disk_type: disk_type.unwrap_or(DiskType::Disk),
    })
}

/// The role of a disk device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskRole {
    /// The disk with this index in the list of specs.
    Disk(usize),
    ConfigDrive,
}

/// A disk device of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskDevice {
    /// The device name, such as `vda`.
    pub device: String,
    /// The bus that is used, which may differ from the requested one.
    pub bus: DiskBus,
    pub role: DiskRole,
}

/// Assigns device names: to the first disk, the config drive, the other disks. The index counts over all buses, so that
/// names are unique and reflect the order of the disks.
#[must_use]
pub fn layout_disks(disks: &[DiskSpec], config_drive: bool) -> Vec<DiskDevice> {
    let buses = disks.iter().map(|disk| match (disk.bus, disk.disk_type) {
        // Virtio has no optical drives.
        (DiskBus::Virtio, DiskType::Cdrom) => DiskBus::Usb,
        (bus, _) => bus,
    });
    let mut order: Vec<(DiskBus, DiskRole)> =
        buses.enumerate().map(|(at, bus)| (bus, DiskRole::Disk(at))).collect();
    if let Some((bus, _)) = order.first().copied().filter(|_| config_drive) {
        order.insert(1, (bus, DiskRole::ConfigDrive));
    }
    let assign = |(at, (bus, role))| DiskDevice { device: device_name(bus, at), bus, role };
    order.into_iter().enumerate().map(assign).collect()
}

/// Returns the name that Linux gives to the disk with index `at` of a bus.
fn device_name(bus: DiskBus, at: usize) -> String {
    let prefix = match bus {
        DiskBus::Virtio => "vd",
        DiskBus::Sata | DiskBus::Scsi | DiskBus::Usb => "sd",
        DiskBus::Nvme => return format!("nvme{at}"),
    };
    // Bijective base 26: `aa` follows `z`.
    let mut letters = Vec::new();
    let mut remaining = at + 1;
    while remaining > 0 {
        remaining -= 1;
        let letter = u8::try_from(remaining % 26).expect("below 26");
        letters.push(char::from(b'a' + letter));
        remaining /= 26;
    }
    prefix.chars().chain(letters.into_iter().rev()).collect()
}
