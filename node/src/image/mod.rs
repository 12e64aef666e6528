//! Disk images, which are untrusted. Our own parser inspects them first, then the host's tools in a sandbox. Errors
//! contain our own words about an image, never the output of a tool. See docs/decisions/0016 and 0017.

mod error;
mod format;
mod qcow2;
pub(crate) mod qcow2_writer;
mod sandbox;
mod tools;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use muster_types::blob::{Compression, ImageFacts, ImageFormat};
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use serde_json::Map;

use crate::command::Commands;
use crate::files::{ScratchDir, io_error};
pub(crate) use error::ImagesError;
use format::{HEADER_SIZE, ImageKind, invalid};
use tools::{Layers, Tools};

/// The size limits of images, in bytes.
#[derive(Debug, Clone, Copy)]
struct ImageLimits {
    size: u64,
    virtual_size: u64,
}

/// Inspects and converts images.
#[derive(Debug)]
pub(crate) struct Images {
    limits: ImageLimits,
    tools: Result<Tools, ImagesError>,
    /// Whether images are only inspected by our own parser and not converted.
    simulated: bool,
}

/// The files of a disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DiskFiles<'a> {
    pub(crate) top: &'a Path,
    pub(crate) base: Option<&'a Path>,
}

/// The context of work on one image.
pub(crate) struct ImageJob {
    pub(crate) scratch: ScratchDir,
    /// Returns the number of bytes that may still be written to the disk.
    pub(crate) free_space: Box<dyn Fn() -> u64 + Send>,
    pub(crate) cancelled: Arc<AtomicBool>,
}

impl Images {
    /// Creates an instance that uses the tools of this host.
    pub(crate) fn new(commands: &Commands, settings: &Settings) -> Self {
        let tools = Tools::find(commands, &settings.image_user);
        Self { limits: ImageLimits::new(settings), tools, simulated: false }
    }

    /// Creates an instance for a simulated node, which uses the tools of this host for decompression if it has them.
    pub(crate) fn simulated() -> Self {
        let settings = Settings::defaults();
        let tools = Tools::shared(&settings.image_user);
        Self { limits: ImageLimits::new(&settings), tools, simulated: true }
    }

    /// Returns why this host cannot handle images, if it cannot.
    pub(crate) fn missing_requirement(&self) -> Option<ImagesError> {
        self.tools.as_ref().err().cloned()
    }

    fn tools(&self) -> Result<&Tools> {
        self.tools.as_ref().map_err(|error| Error::Unavailable(error.to_string()))
    }

    /// Inspects an image and refuses it if it is not safe to use.
    pub(crate) fn inspect(&self, file: &Path, job: &ImageJob) -> Result<ImageFacts> {
        if self.simulated && self.tools.is_err() {
            return self.facts_from_header(file);
        }
        let (facts, file) = self.open(file, job)?;
        if !self.simulated {
            let tools = self.tools()?;
            require_complete(&file, job)?;
            tools.require_agreement(&file, &facts, job)?;
            if facts.format == ImageFormat::Qcow2 {
                tools.require_consistent_tables(&file, job)?;
                let head = tools.guest_header(&file, job)?;
                if format::may_refer_to_files(&head) {
                    return Err(invalid(
                        "the image contains another image, which could refer to any file of the host",
                    ));
                }
            }
        }
        Ok(facts)
    }

    /// Decompresses an image.
    pub(crate) fn decompress(
        &self,
        file: &Path,
        compression: Compression,
        job: &ImageJob,
    ) -> Result<PathBuf> {
        self.tools()?.decompress(file, compression, self.limits.size, job)
    }

    /// Converts an image for VMs. Returns `None` if they use the file itself.
    pub(crate) fn convert(&self, file: &Path, facts: &ImageFacts, job: &ImageJob) -> Result<Option<PathBuf>> {
        if self.simulated {
            return Ok(None);
        }
        let tools = self.tools()?;
        let (found, opened) = self.open(file, job)?;
        if found.format != facts.format || found.virtual_size != facts.virtual_size {
            return Err(invalid("the image changed since it was inspected"));
        }
        if facts.format == ImageFormat::Iso {
            return Ok((opened != file).then_some(opened));
        }
        require_complete(&opened, job)?;
        let output = tools.convert(&opened, facts, self.limits.size, job)?;
        self.require_valid_output(&output, facts.virtual_size)?;
        Ok(Some(output))
    }

    /// Converts a thin image, which contains only the differences to `base`.
    pub(crate) fn flatten(&self, file: &Path, base: &Path, job: &ImageJob) -> Result<Option<PathBuf>> {
        if self.simulated {
            return Ok(None);
        }
        let (facts, base_facts) = (self.facts_from_header(file)?, self.facts_from_header(base)?);
        if facts.format != ImageFormat::Qcow2 || facts.compression.is_some() {
            return Err(invalid("the image is not a qcow2 image that can have a base"));
        }
        require_complete(file, job)?;
        let layers =
            Layers { top: file, base: Some((base, base_facts.format)), virtual_size: facts.virtual_size };
        let output = self.tools()?.flatten(&layers, self.limits.size, job)?;
        self.require_valid_output(&output, facts.virtual_size)?;
        Ok(Some(output))
    }

    /// Copies the disk of a stopped VM: its image, and the base of the image if there is one.
    pub(crate) fn copy_disk(
        &self,
        disk: &DiskFiles<'_>,
        thin: bool,
        compress: bool,
        job: &ImageJob,
    ) -> Result<PathBuf> {
        let virtual_size =
            qcow2_writer::virtual_size(disk.top).map_err(io_error("failed to inspect a disk"))?;
        let base_facts =
            disk.base.map(|base| Ok((base, self.facts_from_header(base)?.format))).transpose()?;
        let layers = Layers { top: disk.top, base: base_facts, virtual_size };
        let output = self.tools()?.copy(&layers, thin, compress, self.limits.size, job)?;
        self.require_valid_output(&output, virtual_size)?;
        Ok(output)
    }

    /// Writes the changes that an image contains to its base, which must not depend on other files.
    pub(crate) fn merge(&self, top: &Path, base: &Path, job: &ImageJob) -> Result<()> {
        self.tools()?.merge(top, base, job)
    }

    fn require_valid_output(&self, output: &Path, virtual_size: u64) -> Result<()> {
        let found = self.facts_from_header(output)?;
        if found.format != ImageFormat::Qcow2 || found.virtual_size != virtual_size {
            return Err(Error::Internal(
                "the conversion of an image has an unexpected format or size".into(),
            ));
        }
        Ok(())
    }

    /// Returns the facts about an image by its header, and the path of its decompressed content.
    fn open(&self, file: &Path, job: &ImageJob) -> Result<(ImageFacts, PathBuf)> {
        let facts = self.facts_from_header(file)?;
        let Some(compression) = facts.compression else { return Ok((facts, file.to_owned())) };
        let decompressed = self.decompress(file, compression, job)?;
        let inner = self.facts_from_header(&decompressed)?;
        if inner.compression.is_some() {
            return Err(invalid("the image is compressed twice"));
        }
        Ok((ImageFacts { compression: Some(compression), ..inner }, decompressed))
    }

    /// Returns the facts about an image by its header.
    pub(crate) fn facts_from_header(&self, path: &Path) -> Result<ImageFacts> {
        let file = File::open(path).map_err(io_error("failed to open an image"))?;
        let size = file.metadata().map_err(io_error("failed to inspect an image"))?.len();
        // Disk tools count in sectors.
        let sectors = size.next_multiple_of(512);
        let (format, compression, virtual_size, format_details) =
            match format::detect(&read_header(&file)?, size)? {
                ImageKind::Raw => (ImageFormat::Raw, None, sectors, Map::new()),
                ImageKind::Iso => (ImageFormat::Iso, None, sectors, Map::new()),
                ImageKind::Qcow2(image) => {
                    (ImageFormat::Qcow2, None, image.virtual_size, image.format_details())
                }
                ImageKind::Compressed(compression) => {
                    (ImageFormat::Raw, Some(compression), sectors, Map::new())
                }
            };
        if size > self.limits.size {
            return Err(invalid("the image is larger than MAX_IMAGE_SIZE_GB allows"));
        }
        if virtual_size == 0 {
            return Err(invalid("the image has a disk of size 0"));
        }
        if virtual_size > self.limits.virtual_size {
            return Err(invalid("the image has a larger disk than MAX_IMAGE_VIRTUAL_SIZE_GB allows"));
        }
        Ok(ImageFacts { format, compression, virtual_size, format_details })
    }
}

impl ImageLimits {
    fn new(settings: &Settings) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a limit in bytes")]
        let bytes = |gigabytes: f64| (gigabytes.max(0.0) * f64::from(1 << 30)) as u64;
        Self {
            size: bytes(settings.max_image_size_gb),
            virtual_size: bytes(settings.max_image_virtual_size_gb),
        }
    }
}

/// Returns how a file is compressed, if it is.
pub(crate) fn compression_of(file: &File) -> Result<Option<Compression>> {
    Ok(format::compression_of(&read_header(file)?))
}

/// Refuses an image whose tables refer to data beyond the end of the file.
fn require_complete(path: &Path, job: &ImageJob) -> Result<()> {
    let file = File::open(path).map_err(io_error("failed to open an image"))?;
    let size = file.metadata().map_err(io_error("failed to inspect an image"))?.len();
    match format::detect(&read_header(&file)?, size)? {
        ImageKind::Qcow2(image) => {
            let max_data = tools::max_decompressed_size(size, u64::MAX);
            image.require_complete(&file, size, max_data, &|| !job.cancelled.load(Ordering::Relaxed))
        }
        ImageKind::Raw | ImageKind::Iso | ImageKind::Compressed(_) => Ok(()),
    }
}

/// Reads the beginning of a file, which determines its format.
fn read_header(file: &File) -> Result<Vec<u8>> {
    let mut head = vec![0; HEADER_SIZE];
    let mut filled = 0;
    while filled < HEADER_SIZE {
        match file.read_at(&mut head[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(io_error("failed to read an image")(error)),
        }
    }
    head.truncate(filled);
    Ok(head)
}
